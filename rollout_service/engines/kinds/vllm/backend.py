"""The backend for vLLM, through its token-in, token-out route (`--enable-scale-out`).

A request is refused if the server's logprobs mode does not give those of the contract's distribution. Versions are the
server's own, token by token, and weights change only while it is paused: a generation that spans an update says where.
Weight updates and pauses need the server's development routes (`VLLM_SERVER_DEV_MODE=1`), and are refused without them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import anyio

from api_schemas.inference import PauseMode
from rollout_service.engines.contract import (
    BackendLoad,
    GenerateRequest,
    Generation,
    ModelInfo,
    SamplingOptions,
    TokenChunk,
    TokenSink,
    new_request_id,
)
from rollout_service.engines.errors import BackendProtocolError, BackendRejected, BackendUnreachable
from rollout_service.engines.kinds.checks import answer_of, parse_version
from rollout_service.engines.kinds.http_backend import (
    CONTROL_SECONDS,
    HttpBackend,
    dump_request,
    kv_key,
    read_model_config,
    routing_shape,
)
from rollout_service.engines.kinds.token_stream import TokenStream
from rollout_service.engines.kinds.vllm import wire
from rollout_service.engines.kinds.vllm.metrics import parse_load
from rollout_service.engines.pool.locality import is_local

_UPDATE_SECONDS = 900.0
_FLUSH_SECONDS = 30.0
_FLUSH_AGAIN_SECONDS = 0.05
_START_DEV = "Start vLLM with VLLM_SERVER_DEV_MODE=1, on a network where only this service can reach it."
_NOT_FOUND = f"answered {HTTPStatus.NOT_FOUND.value}"
_PROBE_PROMPT = (0,)


class VllmStream(TokenStream):
    """The chunks of one answer, each with the new tokens; versions, experts and counts come at the end."""

    def __init__(self, request: GenerateRequest, info: ModelInfo | None, backend_id: str, on_tokens: TokenSink) -> None:
        super().__init__(request, info, backend_id, on_tokens)
        self._entries: list[Any] = []
        self._last: dict[str, Any] | None = None
        self._usage: object = None

    def take(self, chunk: Mapping[str, Any]) -> None:
        wire.expect_request(chunk, self._request)
        if chunk.get("choices") == []:
            self._usage = chunk.get("usage")
            return
        if self._last is not None:
            self._refuse_more()
        choice = wire.only_choice(chunk)
        ids = self._new_ids(choice.get("token_ids") or [], "token_ids")
        entries = wire.logprob_entries(choice) if ids else []
        if choice.get("finish_reason") is not None:
            content = {"content": [*self._entries, *entries]}
            self._last = {**choice, "token_ids": [*self._ids, *ids], "logprobs": content}
        elif ids:
            self._deliver_new(choice, ids)
            self._entries += entries

    def _deliver_new(self, choice: Mapping[str, Any], ids: list[int]) -> None:
        wanted = self._request.extras.top_logprobs
        chunk = TokenChunk(
            ids=ids,
            logprobs=wire.token_logprobs(choice, ids),
            versions=None,
            top_logprobs=wire.top_logprobs(choice, wanted, len(ids), self._info) if wanted else None,
        )
        self._deliver(chunk)

    def whole(self, engine_seconds: float) -> Generation:
        if self._last is None or self._usage is None:
            raise self._broken_off()
        answer = {
            "request_id": wire.engine_request_id(self._request.request_id),
            "choices": [self._last],
            "usage": self._usage,
        }
        return wire.parse_generation(answer, self._request, self._backend_id, self._info, engine_seconds)


class VllmBackend(HttpBackend):
    keeps_kv_apart = True

    def __init__(self, url: str, *, backend_id: str | None = None, timeout: float = 1800.0) -> None:
        super().__init__(url, backend_id=backend_id, timeout=timeout)
        self._mode: wire.LogprobsMode | None = None
        self._open_ids: set[str] = set()
        self._last_load = self._idle_load = ""

    async def _sample(self, request: GenerateRequest, on_tokens: TokenSink | None) -> Generation:
        self._mode = self._mode or await self._find_mode()
        wire.refuse_other_distribution(request.sampling, self._mode, self.id)
        body = wire.generate_body(request, stream=on_tokens is not None)
        if self._info is not None:
            body["cache_salt"] = kv_key(self._info, request.cache_salt)
        stream = VllmStream(request, self._info, self.id, on_tokens) if on_tokens is not None else None
        self._open_ids.add(request.request_id)
        try:
            with self._needs_route():
                return await self._ask(wire.GENERATE, body, request, stream, wire.parse_generation)
        finally:
            self._open_ids.discard(request.request_id)

    async def abort(self, request_id: str | None = None) -> None:
        if request_id is not None:
            await self._abort_ids([request_id])
            return
        try:
            await self._post("/abort_requests", {})
        except BackendRejected:
            await self._abort_ids(sorted(self._open_ids))

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        if mode is PauseMode.ABORT:
            await self._order("/pause?mode=abort&clear_cache=false")
            await self._end_calls()
            return
        await self._order("/pause?mode=keep&clear_cache=false")
        if mode is PauseMode.RETRACT:
            await self._flush()

    async def resume(self) -> None:
        try:
            await self._post("/resume", {})
        except BackendRejected as error:
            if _NOT_FOUND not in str(error):  # a server without the route cannot have been paused
                raise

    async def update_weights(self, path: str, version: int, *, flush_cache: bool = True) -> None:
        await self._refuse_missing(path)
        await self._refuse_tied_on_cpu(path)
        with self._needs_development_routes():
            was_paused = (await self._get("/is_paused")).get("is_paused") is True
        if not was_paused:
            await self._order("/pause?mode=wait&clear_cache=false", seconds=_UPDATE_SECONDS)
        # A failure from here on leaves the server paused, so that unknown weights sample nothing.
        load = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._order("/collective_rpc", load, seconds=_UPDATE_SECONDS)
        with self._has_new_weights():
            if flush_cache:
                await self._flush()
            await self._order("/update_weight_version", {"new_version": str(version)})
        self.has_weights(version)
        if not was_paused:
            await self.resume()

    async def model_info(self) -> ModelInfo:
        self._mode = None  # the server may have been started anew, with another mode
        model_path, context_length = await self._context_length()
        config = await read_model_config(model_path)
        vocab_size = config.get("vocab_size")
        self._info = ModelInfo(
            model_path=model_path,
            tokenizer_path=model_path,
            weight_version=await self._version(),
            vocab_size=vocab_size if isinstance(vocab_size, int) else None,
            context_length=context_length,
            routing_shape=routing_shape(config),
        )
        return self._info

    async def health(self, *, paused: bool = False) -> None:
        del paused  # vLLM's /health samples nothing
        await self._get_bytes("/health")

    async def load(self) -> BackendLoad:
        text = (await self._get_bytes("/metrics")).decode(errors="replace")
        with answer_of(self.id):
            load = parse_load(text)
        # vLLM writes its gauges only in a step of the engine. After an abort they still count requests that are gone,
        # even while the next one is on its way.
        if not self._open_calls and load.signature == self._last_load:
            self._idle_load = load.signature
        self._last_load = load.signature
        return replace(load, running=0, waiting=0) if load.signature == self._idle_load else load

    # ---- generation

    @contextmanager
    def _needs_route(self) -> Iterator[None]:
        try:
            yield
        except BackendRejected as error:
            if _NOT_FOUND not in str(error):
                raise
            raise BackendProtocolError(
                f"does not serve {wire.GENERATE}",
                hint="Check that this is the address of a vLLM server, version 0.32 or newer, and start it with "
                "--enable-scale-out.",
                backend_id=self.id,
            ) from error

    async def _find_mode(self) -> wire.LogprobsMode:
        """Return which logprobs the server gives, from a probe that tells the modes apart."""
        request = GenerateRequest(new_request_id(), _PROBE_PROMPT, SamplingOptions(max_new_tokens=1))
        body = wire.generate_body(request)
        body["sampling_params"] |= {"top_k": 1, "logprobs": 2}
        with self._needs_route():
            answer = await self._call(wire.GENERATE, dump_request(body))
        with answer_of(self.id):
            entries = wire.logprob_entries(wire.only_choice(answer))
            return wire.mode_of(entries[0] if entries else None)

    async def _abort_ids(self, request_ids: list[str]) -> None:
        names = [wire.engine_request_id(each) for each in request_ids]
        await self._post("/inference/v1/abort_requests", {"request_ids": names})

    # ---- weights

    async def _order(self, path: str, body: dict[str, Any] | None = None, seconds: float = CONTROL_SECONDS) -> Any:
        with self._needs_development_routes():
            return await self._post(path, body or {}, seconds)

    @contextmanager
    def _needs_development_routes(self) -> Iterator[None]:
        try:
            yield
        except BackendRejected as error:
            if _NOT_FOUND not in str(error):
                raise
            raise BackendRejected(
                "does not accept commands to pause or to load weights", hint=_START_DEV, backend_id=self.id
            ) from error

    async def _version(self) -> int:
        """Return 0 for a server without the route, whose weights cannot be updated."""
        try:
            answer = await self._get("/weight_info")
        except BackendRejected:
            return 0
        with answer_of(self.id):
            return parse_version(answer.get("weight_version"))

    async def _flush(self) -> None:
        """Drop all KV, also of frozen requests: it is computed again when they resume."""
        with anyio.move_on_after(_FLUSH_SECONDS):
            while True:
                answer = await self._order("/reset_prefix_cache?reset_running_requests=true")
                if isinstance(answer, dict) and answer.get("success") is True:
                    return
                await anyio.sleep(_FLUSH_AGAIN_SECONDS)
        raise BackendUnreachable(
            f"did not flush its KV cache within {_FLUSH_SECONDS:g} s",
            hint="See the engine's log.",
            backend_id=self.id,
        )

    async def _refuse_tied_on_cpu(self, path: str) -> None:
        """On a CPU, vLLM keeps the output layer in a separate format, which a reload skips if the layer is tied to the
        embeddings: without an error, it would sample with new weights and an old last layer.
        """
        config = await read_model_config(path)
        if config.get("tie_word_embeddings") and await self._is_on_cpu():
            raise BackendRejected(
                "runs on a CPU, where vLLM does not reload the output layer of a model with tied embeddings",
                hint="Serve this model with SGLang, or with vLLM on a GPU; or untie its embeddings.",
                backend_id=self.id,
            )

    async def _is_on_cpu(self) -> bool:
        config = (await self._get("/server_info?config_format=json")).get("vllm_config")
        device = config.get("device_config") if isinstance(config, dict) else None
        return "cpu" in str(device)

    async def _refuse_missing(self, path: str) -> None:
        """Refuse a folder whose load would end vLLM; only a folder on this machine can be checked."""
        if is_local(self.url) and not await anyio.to_thread.run_sync(_has_weights, path):
            raise BackendRejected(
                f"cannot load {path}, which has no config.json or no .safetensors files",
                hint="Send the folder of a checkpoint that has both.",
                backend_id=self.id,
            )


def _has_weights(path: str) -> bool:
    folder = Path(path)
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))

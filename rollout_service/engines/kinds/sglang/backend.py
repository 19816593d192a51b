"""The backend for engines with SGLang's native HTTP API, including the embedded engine.

`/generate` is called with `input_ids`, because SGLang's chat route and the routers in front of it lose
token ids.
"""

import time
from collections.abc import Mapping
from typing import Any

import orjson

from api_schemas.inference import DistributedWeights, PauseMode, WeightsGroupRequest
from rollout_service.engines.contract import BackendLoad, GenerateRequest, Generation, ModelInfo, TokenSink
from rollout_service.engines.errors import BackendProtocolError
from rollout_service.engines.kinds.answer_size import generation_bytes
from rollout_service.engines.kinds.checks import parse_version
from rollout_service.engines.kinds.http_backend import (
    CONTROL_SECONDS,
    HttpBackend,
    kv_key,
    read_model_config,
    routing_shape,
)
from rollout_service.engines.kinds.request_json import dump_request
from rollout_service.engines.kinds.sglang.stream import SGLangStream, stream_interval
from rollout_service.engines.kinds.sglang.weights import SGLangWeights
from rollout_service.engines.kinds.sglang.wire import generate_body, parse_generation


class SGLangBackend(HttpBackend):
    """One SGLang server."""

    def __init__(self, url: str, *, backend_id: str | None = None, timeout: float = 1800.0) -> None:
        super().__init__(url, backend_id=backend_id, timeout=timeout)
        self._weights = SGLangWeights(self.id, self._exchange)
        self._streams_incrementally = False

    @property
    def keeps_kv_apart(self) -> bool:
        return True

    async def _sample(
        self, request: GenerateRequest, started: float, on_tokens: TokenSink | None
    ) -> Generation:
        if on_tokens is not None:
            return await self._sample_streaming(request, started, on_tokens)
        body = generate_body(request)
        if self._info is not None:
            body["extra_key"] = kv_key(self._info, request.cache_salt)
        answer = await self._call(
            "POST",
            "/generate",
            content=dump_request(body),
            max_bytes=generation_bytes(request, self._info),
            traceparent=request.traceparent,
        )
        return parse_generation(
            answer,
            request,
            backend_id=self._id,
            info=self._info,
            engine_seconds=time.perf_counter() - started,
        )

    async def _sample_streaming(
        self, request: GenerateRequest, started: float, on_tokens: TokenSink
    ) -> Generation:
        body = generate_body(request, stream_interval(request, is_incremental=self._streams_incrementally))
        if self._info is not None:
            body["extra_key"] = kv_key(self._info, request.cache_salt)
        stream = SGLangStream(request, self._info, self._id, on_tokens)
        max_bytes = generation_bytes(request, self._info)
        await self._stream("/generate", dump_request(body), stream, max_bytes, request.traceparent)
        if stream.is_incremental is not None:
            self._streams_incrementally = stream.is_incremental
        return stream.end(time.perf_counter() - started)

    async def abort(self, request_id: str | None = None) -> None:
        await self._post("/abort_request", {"rid": request_id or "", "abort_all": request_id is None})

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        if mode is PauseMode.ABORT:
            # SGLang's own `abort` sleeps for a second between two checks whether all requests have ended.
            await self._end_calls()
            mode = PauseMode.RETRACT
        await self._post("/pause_generation", {"mode": mode.value})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def update_weights(self, path: str, version: int, *, flush_cache: bool = True) -> None:
        await self._weights.from_disk(path, version, flush_cache=flush_cache)
        self._has_version(version)

    async def receive_weights(
        self, weights: DistributedWeights, version: int, *, flush_cache: bool = True
    ) -> None:
        await self._weights.from_group(weights, version, flush_cache=flush_cache)
        self._has_version(version)

    async def ranks(self) -> int:
        return await self._weights.ranks()

    async def join_group(self, group: WeightsGroupRequest, first_rank: int) -> None:
        await self._weights.join(group, first_rank)

    async def leave_group(self, name: str) -> None:
        await self._weights.leave(name)

    async def model_info(self) -> ModelInfo:
        info = self._object(await self._get("/model_info"), "/model_info")
        _, context_length = await self._context_length()
        model_path = str(info.get("model_path", ""))
        vocab_size = info.get("vocab_size")
        config = await read_model_config(model_path)
        if not isinstance(vocab_size, int):
            vocab_size = config.get("vocab_size")
        self._info = ModelInfo(
            model_path=model_path,
            tokenizer_path=str(info.get("tokenizer_path") or model_path),
            weight_version=parse_version(info.get("weight_version")),
            vocab_size=vocab_size,
            context_length=context_length,
            routing_shape=routing_shape(config),
        )
        return self._info

    async def health(self, *, paused: bool = False) -> None:
        # SGLang's /health samples a token, which a paused engine cannot.
        await self._call(
            "GET", "/model_info" if paused else "/health", seconds=CONTROL_SECONDS, is_json=False
        )

    async def load(self) -> BackendLoad:
        loads = self._object(await self._get("/v1/loads"), "/v1/loads").get("loads")
        if not isinstance(loads, list) or not loads:
            raise BackendProtocolError("/v1/loads has no entry", backend_id=self._id)
        try:
            return BackendLoad(
                running=sum(int(load["num_running_reqs"]) for load in loads),
                waiting=sum(int(load["num_waiting_reqs"]) for load in loads),
                used_tokens=sum(int(load["num_used_tokens"]) for load in loads),
                token_usage=max(float(load["token_usage"]) for load in loads),
                waiting_tokens=_sum(loads, "num_waiting_uncached_tokens"),
                capacity_tokens=_sum(loads, "max_total_num_tokens"),
                signature=orjson.dumps(loads).decode(),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BackendProtocolError(
                f"/v1/loads has an entry that cannot be read: {error!r}", backend_id=self._id
            ) from error

    async def _exchange(
        self, path: str, body: Mapping[str, Any] | None, *, seconds: float = CONTROL_SECONDS
    ) -> Any:
        return await (self._get(path) if body is None else self._post(path, body, seconds))


def _sum(loads: list[dict[str, Any]], name: str) -> int | None:
    """Return the sum over the ranks; None if the engine does not report this number."""
    values = [load.get(name) for load in loads]
    return sum(value for value in values if isinstance(value, int)) if values[0] is not None else None

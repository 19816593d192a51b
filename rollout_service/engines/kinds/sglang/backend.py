"""The backend for engines with SGLang's native HTTP API, including the embedded engine.

It calls `/generate` with `input_ids`, because SGLang's chat route and the routers in front of it lose token ids.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from api_schemas.inference import PauseMode
from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import (
    BackendLoad,
    GenerateRequest,
    Generation,
    ModelInfo,
    TokenChunk,
    TokenSink,
)
from rollout_service.engines.errors import BackendProtocolError, BackendRejected, BackendUnreachable
from rollout_service.engines.kinds import checks as check
from rollout_service.engines.kinds.checks import mapping, parse_version
from rollout_service.engines.kinds.http_backend import (
    QUOTED_CHARACTERS,
    kv_key,
    read_model_config,
    routing_shape,
)
from rollout_service.engines.kinds.sglang import wire
from rollout_service.engines.kinds.sglang.weights import SGLangWeights
from rollout_service.engines.kinds.token_stream import TokenStream


class SGLangBackend(SGLangWeights):
    keeps_kv_apart = True
    _streams_incrementally = False

    async def _sample(self, request: GenerateRequest, on_tokens: TokenSink | None) -> Generation:
        stream = interval = None
        if on_tokens is not None:
            stream = SGLangStream(request, self._info, self.id, on_tokens)
            interval = stream_interval(request, is_incremental=self._streams_incrementally)
        body = wire.generate_body(request, interval)
        if self._info is not None:
            body["extra_key"] = kv_key(self._info, request.cache_salt)
        generation = await self._ask("/generate", body, request, stream, wire.parse_generation)
        if stream is not None and stream.is_incremental is not None:
            self._streams_incrementally = stream.is_incremental
        return generation

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

    async def model_info(self) -> ModelInfo:
        info = await self._get("/model_info")
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
        await self._get_bytes("/model_info" if paused else "/health")

    async def load(self) -> BackendLoad:
        loads = (await self._get("/v1/loads")).get("loads")
        if not isinstance(loads, list) or not loads:
            raise BackendProtocolError("/v1/loads has no entry", backend_id=self.id)
        try:
            return BackendLoad(
                running=sum(int(load["num_running_reqs"]) for load in loads),
                waiting=sum(int(load["num_waiting_reqs"]) for load in loads),
                used_tokens=sum(int(load["num_used_tokens"]) for load in loads),
                waiting_tokens=_sum(loads, "num_waiting_uncached_tokens"),
                capacity_tokens=_sum(loads, "max_total_num_tokens"),
                signature=orjson.dumps(loads).decode(),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BackendProtocolError(
                f"/v1/loads has an entry that cannot be read: {error!r}", backend_id=self.id
            ) from error


def _sum(loads: list[dict[str, Any]], name: str) -> int | None:
    """Return the sum over the ranks; None if the engine does not report this number."""
    values = [load.get(name) for load in loads]
    return sum(value for value in values if isinstance(value, int)) if values[0] is not None else None


_CUMULATIVE_CHUNKS = 256
_SMALLEST_CUMULATIVE = 8
_REFUSED = range(400, 500)
_FAILED = range(500, 600)
_OF_TOKENS = ("output_token_logprobs", "output_top_logprobs")


def stream_interval(request: GenerateRequest, *, is_incremental: bool) -> int:
    if is_incremental:
        return request.chunk_tokens
    smallest = max(_SMALLEST_CUMULATIVE, request.chunk_tokens)
    return max(smallest, math.ceil(request.sampling.max_new_tokens / _CUMULATIVE_CHUNKS))


class SGLangStream(TokenStream):
    """The chunks of one answer of `/generate`, each with all tokens so far or with only the new ones.

    `completion_tokens` tells the two apart, chunk by chunk. A server started with `--incremental-streaming-output`
    sends each token once; others send n tokens in a time and size that grow with n squared, so they are asked for fewer
    chunks.
    """

    def __init__(self, request: GenerateRequest, info: ModelInfo | None, backend_id: str, on_tokens: TokenSink) -> None:
        super().__init__(request, info, backend_id, on_tokens)
        self.is_incremental: bool | None = None
        """Whether chunks have only the new tokens; None while none has shown it."""
        self._versions: list[int] = []
        self._entries: dict[str, list[Any]] = {}
        self._last: dict[str, Any] | None = None

    def take(self, chunk: Mapping[str, Any]) -> None:
        if self._last is not None:
            self._refuse_more()
        meta = mapping(chunk.get("meta_info"), "meta_info")
        total = self._total(meta)
        new_ids = self._new(chunk.get("output_ids"), "output_ids", total)
        entries = {name: self._new(meta[name], name, total) for name in _OF_TOKENS if meta.get(name) is not None}
        if meta.get("finish_reason") is not None:
            self._end_with(chunk, meta, new_ids, entries)
        elif new_ids:
            self._deliver_new(meta, new_ids, entries)

    def _total(self, meta: Mapping[str, Any]) -> int:
        """Return the number of tokens sampled so far; an abort in the engine's queue may not say."""
        total = meta.get("completion_tokens")
        if total is None and meta.get("finish_reason") is not None:
            return len(self._ids)
        if not isinstance(total, int) or total < len(self._ids):
            raise BackendProtocolError(f"completion_tokens is {total!r} after {len(self._ids)}")
        return total

    def _new(self, values: object, name: str, total: int) -> list[Any]:
        """Return the entries of the new tokens, from a list for all tokens or only for the new ones."""
        new = total - len(self._ids)
        if not isinstance(values, list):
            raise BackendProtocolError(f"{name} is not a list")
        if new and self._ids:
            self.is_incremental = len(values) < total
        if new and len(values) not in {new, total}:
            raise BackendProtocolError(f"{name} has {len(values)} entries for {new} new of {total} tokens")
        return values[len(values) - new :]

    def _deliver_new(self, meta: Mapping[str, Any], ids: list[Any], entries: dict[str, list[Any]]) -> None:
        ids = self._new_ids(ids, "output_ids")
        versions = wire.token_versions(meta, len(self._ids) + len(ids))
        chunk = TokenChunk(
            ids=ids,
            logprobs=wire.token_logprobs(entries, ids),
            versions=versions[len(self._ids) :],
            top_logprobs=wire.top_logprobs(entries, self._request, len(ids), self._info)
            if self._request.extras.top_logprobs
            else None,
            cached_tokens=check.cached_count(
                meta.get("cached_tokens"),
                "meta_info.cached_tokens",
                len(self._request.input_ids),
                required=True,
            ),
        )
        self._keep(entries)
        self._versions += versions[len(self._ids) :]
        self._deliver(chunk)

    def _keep(self, entries: dict[str, list[Any]]) -> None:
        for name, values in entries.items():
            self._entries.setdefault(name, []).extend(values)

    # ---- the end

    def _end_with(
        self, chunk: Mapping[str, Any], meta: Mapping[str, Any], ids: list[Any], entries: dict[str, list[Any]]
    ) -> None:
        _refuse_failure(mapping(meta["finish_reason"], "meta_info.finish_reason"))
        total, repeated = len(self._ids) + len(ids), chunk["output_ids"][: len(self._ids)]
        if len(chunk["output_ids"]) == total and repeated != self._ids:
            raise BackendProtocolError("the answer does not begin with the tokens that were streamed")
        self._keep(entries)
        self._last = {**chunk, "output_ids": self._ids + ids, "meta_info": {**meta, **self._entries}}

    def whole(self, engine_seconds: float) -> Generation:
        if self._last is None:
            raise self._broken_off()
        generation = wire.parse_generation(self._last, self._request, self._backend_id, self._info, engine_seconds)
        known = len(self._versions)
        return replace(generation, versions=self._versions + generation.versions[known:])


def _refuse_failure(reason: Mapping[str, Any]) -> None:
    """Raise if the request failed, which an unstreamed answer reports by its status."""
    status = reason.get("status_code")
    if reason.get("type") != FinishReason.ABORT.value or not isinstance(status, int):
        return
    message = f"/generate ended with {status}: {str(reason.get('message'))[:QUOTED_CHARACTERS]}"
    if status in _REFUSED:
        raise BackendRejected(message)
    if status in _FAILED:
        raise BackendUnreachable(message, hint="See the engine's log.")

"""The chunks of one streamed answer, checked one by one, delivered, and joined.

A token is delivered once, after its own checks, with its logprob; the last chunk only after those of the whole answer,
so that an answer that breaks off never delivers a token that ends it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from rollout_service.engines.contract import GenerateRequest, Generation, ModelInfo, TokenChunk, TokenSink
from rollout_service.engines.errors import BackendProtocolError, BackendUnreachable
from rollout_service.engines.kinds import checks as check


class TokenStream(ABC):
    def __init__(self, request: GenerateRequest, info: ModelInfo | None, backend_id: str, on_tokens: TokenSink) -> None:
        self._request = request
        self._info = info
        self._backend_id = backend_id
        self._on_tokens = on_tokens
        self._ids: list[int] = []
        """All ids but those of the last chunk delivered."""

    @abstractmethod
    def take(self, chunk: Mapping[str, Any]) -> None:
        """Check a chunk, and deliver its tokens."""

    @abstractmethod
    def whole(self, engine_seconds: float) -> Generation:
        """Check the answer and return it; may be called in a thread."""

    def end(self, generation: Generation) -> None:
        """Deliver the last chunk."""
        as_one_chunk(generation, self._on_tokens, first=len(self._ids))

    # ---- for subclasses

    def _new_ids(self, ids: object, name: str) -> list[int]:
        return check.sampled_ids(
            ids,
            name=name,
            budget=self._request.sampling.max_new_tokens - len(self._ids),
            vocab_size=self._info.vocab_size if self._info else None,
        )

    def _deliver(self, chunk: TokenChunk) -> None:
        self._ids += chunk.ids
        self._on_tokens(chunk)

    def _broken_off(self) -> BackendUnreachable:
        return BackendUnreachable(
            "ended its stream without saying why sampling ended",
            hint="See the engine's log.",
            backend_id=self._backend_id,
        )

    def _refuse_more(self) -> None:
        raise BackendProtocolError("goes on streaming after its last chunk")


def is_streamable(request: GenerateRequest) -> bool:
    """Return whether an answer can be delivered in parts; prompt logprobs and constrained text come as a whole."""
    return request.extras.prompt_logprobs_from is None and request.sampling.json_schema is None


def as_one_chunk(generation: Generation, on_tokens: TokenSink, *, first: int = 0) -> None:
    """Deliver an answer's tokens from `first` on, if there are any."""
    if first == len(generation.output_ids):
        return
    likeliest = generation.extras.top_logprobs
    chunk = TokenChunk(
        ids=generation.output_ids[first:],
        logprobs=generation.logprobs[first:],
        versions=generation.versions[first:],
        top_logprobs=likeliest[first:] if likeliest is not None else None,
        cached_tokens=generation.cached_tokens,
    )
    on_tokens(chunk)


CEILING_BYTES = 1 << 30
_BASE_BYTES = 1 << 20
_TOKEN_BYTES = 1_024
"""An id, its text, its log-probability and its version as JSON, several times as long as those of engines."""
_CANDIDATE_BYTES = 256
"""One of the likeliest tokens with its log-probability."""
_EXPERT_BYTES = 16
"""One expert's number, in base64 or as JSON."""
_EXPERTS_A_TOKEN = 128 * 16
"""Layers and experts of a token of the largest models, used if the engine's model is unknown."""


def generation_bytes(request: GenerateRequest, info: ModelInfo | None) -> int:
    """Return the limit of an answer's size: generous for the request, and at most `CEILING_BYTES`."""
    sampled, prompt, extras = request.sampling.max_new_tokens, len(request.input_ids), request.extras
    size = _BASE_BYTES + sampled * (_TOKEN_BYTES + extras.top_logprobs * _CANDIDATE_BYTES)
    if extras.prompt_logprobs_from is not None:
        size += prompt * (_TOKEN_BYTES + extras.top_logprobs * _CANDIDATE_BYTES)
    if extras.routed_experts_from is not None:
        shape = info.routing_shape if info is not None else None
        size += (prompt + sampled) * (shape[0] * shape[1] if shape else _EXPERTS_A_TOKEN) * _EXPERT_BYTES
    return min(size, CEILING_BYTES)

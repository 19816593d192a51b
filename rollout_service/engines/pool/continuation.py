"""One turn from one or more engine calls: an interruptible generation.

An engine may end a request early, because of a weight update or because its machine died; `Continuation` asks for the
rest. It never samples a token twice or exceeds the budget: an interrupted request for N tokens has the result of one
that was not. Streamed tokens are kept even if the answer breaks off. Only text constrained by a JSON schema begins
anew, because an engine cannot go on in the middle of it; it is delivered at its end.

An engine would not find a stop string at whose possible beginning the answer was interrupted. So the next attempt is
for as many tokens as may complete it, and is delivered once it has ended.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import (
    GenerateRequest,
    Generation,
    RequestedExtras,
    ReturnedExtras,
    TokenChunk,
    TokenSink,
    TopLogprob,
)
from rollout_service.engines.errors import BackendProtocolError
from rollout_service.engines.kinds.token_stream import as_one_chunk

_MAX_ATTEMPTS = 10_000  # as many as the attempt suffix of a request id can number


@dataclass(slots=True)
class MergedExtras:
    """The extras of the parts of an interrupted generation.

    Each token's values come from the attempt that sampled or read it first; nothing from before a weight update is
    asked for again after it.
    """

    wanted: RequestedExtras
    _top_logprobs: list[list[TopLogprob]] = field(default_factory=list)
    _prompt_logprobs: list[float | None] | None = None
    _experts: list[NDArray[np.int32]] = field(default_factory=list)

    def next(self) -> RequestedExtras:
        """Return what to request next; the prompt ends with everything sampled so far."""
        first = self.wanted.routed_experts_from
        if first is None and self.wanted.prompt_logprobs_from is None:
            return self.wanted
        if first is not None:
            first += sum(len(part) for part in self._experts)
        return replace(
            self.wanted,
            prompt_logprobs_from=self.wanted.prompt_logprobs_from if self._prompt_logprobs is None else None,
            routed_experts_from=first,
        )

    def add(self, part: ReturnedExtras) -> None:
        """Add the extras of an attempt; one without tokens has none."""
        self._top_logprobs += part.top_logprobs or []
        if self._prompt_logprobs is None:
            self._prompt_logprobs = part.prompt_logprobs
        if part.routed_experts is not None:
            self._experts.append(part.routed_experts)

    def whole(self) -> ReturnedExtras:
        return ReturnedExtras(
            top_logprobs=self._top_logprobs if self.wanted.top_logprobs else None,
            prompt_logprobs=self._prompt_logprobs,
            routed_experts=np.concatenate(self._experts) if self._experts else None,
        )


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTES = 4
"""The most bytes, and so the most tokens, that spell a character."""


@dataclass(frozen=True, slots=True)
class CutStops:
    """Stop strings that an interruption has cut: an engine looks for them only in the tokens that it samples itself."""

    stops: Sequence[str]
    decode: Callable[[Sequence[int]], str]

    def to_complete(self, ids: Sequence[int]) -> int:
        """Return how many tokens may complete a stop string that begins at the end of these; 0 if none does."""
        text = self.decode(self._tail(ids))
        if text.endswith(_REPLACEMENT):  # a character that is not complete may be the first of a string
            return _BYTES * self._longest
        ends = (text[-length:] for length in range(min(self._longest - 1, len(text)), 0, -1))
        rest = [stop[len(end) :] for end in ends for stop in self.stops if stop.startswith(end)]
        return max((len(part.encode()) for part in rest), default=0)

    def end_of(self, before: Sequence[int], new: Sequence[int]) -> tuple[int, str] | None:
        """Return how many new ids complete the first stop string, and the string; None without one."""
        tail = self._tail(before)
        begin = max(0, len(self.decode(tail).rstrip(_REPLACEMENT)) - self._longest + 1)

        def found(count: int) -> list[str]:
            text = self.decode([*tail, *new[:count]])
            return [stop for stop in self.stops if text.find(stop, begin) >= 0]

        if not found(len(new)):
            return None
        count = 1 + bisect_left(range(1, len(new)), True, key=lambda count: bool(found(count)))
        return count, min(found(count), key=len)

    def _tail(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[-_BYTES * self._longest :]

    @property
    def _longest(self) -> int:
        return max(map(len, self.stops))


def cut_at(generation: Generation, count: int, stop: str) -> Generation:
    dropped, extras = len(generation.output_ids) - count, generation.extras
    if dropped and extras.top_logprobs is not None:
        extras = replace(extras, top_logprobs=extras.top_logprobs[:count])
    if dropped and extras.routed_experts is not None:
        extras = replace(extras, routed_experts=extras.routed_experts[:-dropped])
    return replace(
        generation,
        output_ids=generation.output_ids[:count],
        logprobs=generation.logprobs[:count],
        versions=generation.versions[:count],
        finish_reason=FinishReason.STOP,
        matched=stop,
        extras=extras,
    )


@dataclass(slots=True)
class Continuation:
    request: GenerateRequest
    on_tokens: TokenSink | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    attempts: int = 0
    engine_seconds: float = 0.0
    _cached_tokens: int | None = None
    _exposed: set[int] = field(default_factory=set)
    _extras: MergedExtras = field(init=False)
    _streamed: list[TokenChunk] = field(default_factory=list)
    """The chunks that the present attempt has delivered."""
    _began: float = 0.0
    _cut_stops: CutStops | None = field(init=False, default=None)
    _to_complete: int = 0
    """The present attempt's tokens if they may complete a stop string; else 0."""

    def __post_init__(self) -> None:
        self._extras = MergedExtras(self.request.extras)
        if self.request.sampling.stop and self.request.decode is not None:
            self._cut_stops = CutStops(self.request.sampling.stop, self.request.decode)

    @property
    def sink(self) -> TokenSink | None:
        """None if the attempt need not stream."""
        is_streamed = self.on_tokens is not None and self.is_resumable and not self._to_complete
        return self._pass_on if is_streamed else None

    @property
    def has_streamed(self) -> bool:
        return bool(self._streamed)

    def next_request(self) -> GenerateRequest:
        """Request the remaining tokens, under a new id."""
        request_id = f"{self.request.request_id}-{self.attempts % _MAX_ATTEMPTS:04d}"
        self.attempts += 1
        self._began = time.perf_counter()
        request = self.request
        sampling, prompt = request.sampling, request.input_ids
        if self.output_ids:
            left = sampling.max_new_tokens - len(self.output_ids)
            self._to_complete = 0 if self._cut_stops is None else self._cut_stops.to_complete(self.output_ids)
            sampling = replace(sampling, max_new_tokens=min(left, self._to_complete or left))
            prompt = [*prompt, *self.output_ids]
        return GenerateRequest(  # `replace` takes three times as long
            request_id,
            prompt,
            sampling,
            self._extras.next(),
            known=request.known,
            chunk_tokens=request.chunk_tokens,
            cache_salt=request.cache_salt,
            traceparent=request.traceparent,
            decode=request.decode,
        )

    def add(self, part: Generation, read_by: int | None = None) -> Generation | None:
        """Return the whole generation once it is complete.

        `read_by` is the only weight version whose KV the request could find when it was sent; None if it could find
        that of any version.
        """
        self._streamed.clear()
        if self._to_complete and self._cut_stops is not None:
            part = self._completed(part, self._cut_stops)
        exposed = set(part.versions) - {read_by}
        is_aborted = part.finish_reason is FinishReason.ABORT
        if self.attempts <= 1 and not exposed and not is_aborted:
            return self._hand_over(part)  # the usual case: nothing to join
        self.engine_seconds += part.engine_seconds
        if is_aborted and not self.is_resumable:
            return None
        self._exposed |= exposed
        self._append(part.output_ids, part.logprobs, part.versions, part.extras, part.cached_tokens)
        if not is_aborted:
            return self._hand_over(self._whole(part.finish_reason, part.matched, part.backend_id))
        return self._if_spent(part.backend_id)

    def keep_streamed(
        self, backend_id: str, read_by: int | None = None, version: int | None = None
    ) -> Generation | None:
        """Keep the tokens that the present attempt delivered before it broke off; return the generation if it is whole.

        `version` is the only one that can have sampled since the attempt was sent; None if there may be several.

        Raises:
            BackendProtocolError: Neither the engine nor `version` says which weights sampled these tokens.
        """
        chunks, self._streamed = self._streamed, []
        if not chunks:
            return None
        versions = list(chain.from_iterable(_versions(chunk, version, backend_id) for chunk in chunks))
        likeliest = [row for chunk in chunks for row in chunk.top_logprobs or []]
        self._exposed |= set(versions) - {read_by}
        self.engine_seconds += time.perf_counter() - self._began
        self._append(
            list(chain.from_iterable(chunk.ids for chunk in chunks)),
            list(chain.from_iterable(chunk.logprobs for chunk in chunks)),
            versions,
            ReturnedExtras(top_logprobs=likeliest),
            chunks[0].cached_tokens,
        )
        return self._if_spent(backend_id)

    # ---- private

    def _completed(self, part: Generation, stops: CutStops) -> Generation:
        """Deliver an attempt that was to complete a stop string, and return it: as aborted if the answer goes on."""
        self._to_complete = 0
        if (end := stops.end_of(self.output_ids, part.output_ids)) is not None:
            part = cut_at(part, *end)
        elif part.finish_reason is FinishReason.LENGTH:
            part = replace(part, finish_reason=FinishReason.ABORT)
        if self.on_tokens is not None:
            as_one_chunk(part, self.on_tokens)
        return part

    @property
    def is_resumable(self) -> bool:
        """Whether the next attempt goes on after the tokens of the last one."""
        return self.request.sampling.json_schema is None

    def _pass_on(self, chunk: TokenChunk) -> None:
        self._streamed.append(chunk)
        if self.on_tokens is not None:
            self.on_tokens(chunk)

    def _append(
        self,
        ids: list[int],
        logprobs: list[float],
        versions: list[int],
        extras: ReturnedExtras,
        cached_tokens: int | None,
    ) -> None:
        self.output_ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        self._extras.add(extras)
        if self._cached_tokens is None and ids and cached_tokens is not None:
            # A later attempt's prompt is longer, by what was sampled before.
            self._cached_tokens = min(cached_tokens, len(self.request.input_ids))

    def _if_spent(self, backend_id: str) -> Generation | None:
        """Return the generation if it has stopped, though its end was lost, or if its budget is used up."""
        if self.output_ids and (last := self.output_ids[-1]) in self.request.sampling.stop_token_ids:
            return self._whole(FinishReason.STOP, last, backend_id)
        if len(self.output_ids) < self.request.sampling.max_new_tokens:
            return None
        return self._whole(FinishReason.LENGTH, None, backend_id)

    def _whole(self, finish_reason: FinishReason, matched: int | str | None, backend_id: str) -> Generation:
        return Generation(
            output_ids=self.output_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=finish_reason,
            matched=matched,
            prompt_tokens=len(self.request.input_ids),
            cached_tokens=self._cached_tokens or 0,
            backend_id=backend_id,
            engine_seconds=self.engine_seconds,
            kept_kv_versions=frozenset(self._exposed),
            extras=self._extras.whole(),
        )

    def _hand_over(self, generation: Generation) -> Generation:
        """Deliver a generation as a whole if it could not be in parts."""
        if self.on_tokens is not None and not self.is_resumable:
            as_one_chunk(generation, self.on_tokens)
        return generation


def _versions(chunk: TokenChunk, version: int | None, backend_id: str) -> list[int]:
    if chunk.versions is not None:
        return chunk.versions
    if version is None:
        raise BackendProtocolError(
            "broke off an answer that may span a weight update, so the versions of its tokens are unknown",
            hint="Repeat the request; update weights with mode abort to avoid this.",
            backend_id=backend_id,
        )
    return [version] * len(chunk.ids)

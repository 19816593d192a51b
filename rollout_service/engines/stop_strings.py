"""Stop strings that an interruption has cut: an engine looks for them only in what it samples itself.

Guarantee: an answer ends with the token that completes a stop string, however often it was interrupted in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import Generation

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTES = 4
"""The most bytes of a character, and so the most tokens that spell one."""


@dataclass(frozen=True, slots=True)
class CutStops:
    """The stop strings of one request."""

    stops: Sequence[str]
    decode: Callable[[Sequence[int]], str]

    def to_complete(self, ids: Sequence[int]) -> int:
        """Return how many more tokens may complete a stop string that begins at the end of these; 0 if none does."""
        text = self.decode(self._tail(ids))
        if text.endswith(_REPLACEMENT):  # a character that is not complete may be the first of a string
            return _BYTES * self._longest
        ends = (text[-length:] for length in range(min(self._longest - 1, len(text)), 0, -1))
        rest = [stop[len(end) :] for end in ends for stop in self.stops if stop.startswith(end)]
        return max((len(part.encode()) for part in rest), default=0)

    def end_of(self, before: Sequence[int], new: Sequence[int]) -> tuple[int, str] | None:
        """Return after how many of the new ids the first stop string is complete, and the string; None without one."""
        tail = self._tail(before)
        begin = max(0, len(self.decode(tail).rstrip(_REPLACEMENT)) - self._longest + 1)
        for count in range(1, len(new) + 1):
            text = self.decode([*tail, *new[:count]])
            if found := [stop for stop in self.stops if text.find(stop, begin) >= 0]:
                return count, min(found, key=len)
        return None

    def _tail(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[-_BYTES * self._longest :]

    @property
    def _longest(self) -> int:
        return max(map(len, self.stops))


def cut_at(generation: Generation, count: int, stop: str) -> Generation:
    """Return an answer that ends after so many of its tokens, with a stop string."""
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

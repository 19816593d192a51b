"""Joins the extras of the parts of an interrupted generation.

Guarantees: each token's values come from the attempt that sampled or read it first; nothing from before a weight update
is asked for again after it.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rollout_service.engines.contract import RequestedExtras, ReturnedExtras, TopLogprob


@dataclass(slots=True)
class MergedExtras:
    """The extras received so far, of those that `wanted` asks for."""

    wanted: RequestedExtras
    _top_logprobs: list[list[TopLogprob]] = field(default_factory=list)
    _prompt_logprobs: list[float | None] | None = None
    _experts: list[NDArray[np.int32]] = field(default_factory=list)

    def next(self) -> RequestedExtras:
        """Return what to ask of the next attempt, whose prompt ends with everything sampled so far."""
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
        """Add the extras of an attempt; an attempt without tokens has none."""
        self._top_logprobs += part.top_logprobs or []
        if self._prompt_logprobs is None:
            self._prompt_logprobs = part.prompt_logprobs
        if part.routed_experts is not None:
            self._experts.append(part.routed_experts)

    def whole(self) -> ReturnedExtras:
        """Return all extras, as if one answer had brought them."""
        return ReturnedExtras(
            top_logprobs=self._top_logprobs if self.wanted.top_logprobs else None,
            prompt_logprobs=self._prompt_logprobs,
            routed_experts=np.concatenate(self._experts) if self._experts else None,
        )

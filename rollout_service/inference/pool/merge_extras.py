"""What was extras with the parts of an interrupted generation, put together again.

Guarantees: each token's figures are those of the attempt that sampled or read it first: nothing that an update of the
weights came after is asked for a second time.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rollout_service.inference.contract import RequestedExtras, ReturnedExtras, TopLogprob


@dataclass(slots=True)
class MergedExtras:
    """What came so far of what `wanted` asks for."""

    wanted: RequestedExtras
    _top_logprobs: list[list[TopLogprob]] = field(default_factory=list)
    _prompt_logprobs: list[float | None] | None = None
    _experts: list[NDArray[np.int32]] = field(default_factory=list)

    def next(self) -> RequestedExtras:
        """What is to be asked of the next attempt, whose prompt has everything that was sampled at its end."""
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
        """Take what came with an attempt; one that sampled nothing has nothing."""
        self._top_logprobs += part.top_logprobs or []
        if self._prompt_logprobs is None:
            self._prompt_logprobs = part.prompt_logprobs
        if part.routed_experts is not None:
            self._experts.append(part.routed_experts)

    def whole(self) -> ReturnedExtras:
        """Everything that came, as if it had come at once."""
        return ReturnedExtras(
            top_logprobs=self._top_logprobs if self.wanted.top_logprobs else None,
            prompt_logprobs=self._prompt_logprobs,
            routed_experts=np.concatenate(self._experts) if self._experts else None,
        )

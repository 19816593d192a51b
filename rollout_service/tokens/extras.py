"""The extras of a segment, kept in step with its tokens as it grows.

Guarantees: every list has one entry per token of the segment; experts have one row per token, except for the last token
of the segment's last turn. If any extras of a turn do not fit it, none are added.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from api_schemas.trajectories import RoutedExperts
from rollout_service.tokens.errors import RecordError

_Name = Literal["uint8", "uint16", "int32"]
_DTYPES: tuple[tuple[_Name, str], ...] = (("uint8", "u1"), ("uint16", "<u2"), ("int32", "<i4"))


class TurnExtras(Protocol):
    """The extras of one turn, as in `engines.contract.ReturnedExtras`; None for those that were not requested."""

    @property
    def top_logprobs(self) -> Sequence[Sequence[tuple[int, float]]] | None:
        """The likeliest ids with their logprobs for each sampled token."""

    @property
    def prompt_logprobs(self) -> Sequence[float | None] | None:
        """The log-probabilities of the prompt's tokens that are new to the segment."""

    @property
    def routed_experts(self) -> NDArray[np.int32] | None:
        """`[tokens, layers, experts per token]` of the tokens for which the segment had no experts before."""


@dataclass(slots=True)
class GrowingExtras:
    """The extras of a segment to which turns are added."""

    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    _experts: list[NDArray[np.int32]] = field(default_factory=list)

    @property
    def routed(self) -> int:
        """The number of tokens that have experts."""
        return sum(len(part) for part in self._experts)

    def add_turn(self, turn: TurnExtras, *, before: int, prompt: int, sampled: int) -> None:
        """Add the extras of a turn; the segment had `before` tokens, and the prompt has `prompt`.

        Raises:
            RecordError: The number of extras does not match the tokens.
        """
        self._check(turn, before=before, prompt=prompt, sampled=sampled)
        if turn.top_logprobs is not None:
            ids, values = self.top_ids or [], self.top_logprobs or []
            context: list[list[int]] = [[] for _ in range(prompt - len(ids))]
            self.top_ids = ids + context + [[token for token, _ in row] for row in turn.top_logprobs]
            no_values: list[list[float]] = [[] for _ in context]
            self.top_logprobs = (
                values + no_values + [[value for _, value in row] for row in turn.top_logprobs]
            )
        if turn.prompt_logprobs is not None:
            known = self.prompt_logprobs or []
            self.prompt_logprobs = [*known, *turn.prompt_logprobs, *([None] * sampled)]
        if turn.routed_experts is not None:
            self._experts.append(turn.routed_experts)

    def add_context(self, turn: TurnExtras | None, *, before: int, end: int) -> None:
        """Add the extras of the tokens that a turn read and sampled, in a segment where they are context.

        The segment had `before` tokens and has `end` with them. Log-probabilities of tokens that were sampled are
        unknown here: those of the engine are not at temperature 1.
        """
        if turn is None:
            return
        if turn.top_logprobs is not None:
            self.top_ids = [*(self.top_ids or []), *([] for _ in range(end - before))]
            self.top_logprobs = [*(self.top_logprobs or []), *([] for _ in range(end - before))]
        if turn.prompt_logprobs is not None:
            known = [*(self.prompt_logprobs or []), *turn.prompt_logprobs]
            self.prompt_logprobs = [*known, *([None] * (end - len(known)))]
        if turn.routed_experts is not None:
            self._experts.append(turn.routed_experts)

    def routed_experts(self) -> RoutedExperts | None:
        """Return all experts so far, in the narrowest type that holds them."""
        if not self._experts:
            return None
        values = np.concatenate(self._experts)
        largest = int(values.max(initial=0))
        name, code = next(each for each in _DTYPES if largest <= np.iinfo(each[1]).max)
        data = base64.b64encode(values.astype(code).tobytes()).decode()
        return RoutedExperts.model_construct(shape=list(values.shape), dtype=name, data=data)

    def _check(self, turn: TurnExtras, *, before: int, prompt: int, sampled: int) -> None:
        lengths = (
            ("top_logprobs", turn.top_logprobs, sampled),
            ("prompt_logprobs", turn.prompt_logprobs, prompt - before),
            ("routed_experts", turn.routed_experts, prompt + sampled - 1 - self.routed),
        )
        for name, values, expected in lengths:
            if values is not None and len(values) != expected:
                raise RecordError(
                    f"{name} came for {len(values)} tokens, but {expected} were expected",
                    hint="Ask the engine for them from the first token that the segment lacks.",
                )

"""What the judge's votes on a turn come to.

Guarantees: a value rests on valid votes alone. The value with most of them counts; if several have most, it is 0, and
the reason says so. Without any there is no value, which is not the same as 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from api_schemas.rollouts.sessions import MarkReason, Votes
from rollout_service.engines.errors import InferenceError
from rollout_service.judging.contract import Vote, VoteOutcome
from rollout_service.live.judging.prompt import VALUES


@dataclass(frozen=True, slots=True)
class VoteTally:
    """The outcome of a vote."""

    value: float | None
    reason: MarkReason
    votes: Votes


def tally(votes: Sequence[Vote]) -> VoteTally:
    """Return what the votes come to; one with another label than -1, 0 or 1 has failed."""
    counts = Counter(VALUES[vote.label] for vote in votes if vote.label in VALUES)
    counted = Votes(
        minus=counts[-1.0], zero=counts[0.0], plus=counts[1.0], failed=len(votes) - counts.total()
    )
    if not counts:
        is_late = bool(votes) and all(vote.outcome is VoteOutcome.TIMED_OUT for vote in votes)
        return VoteTally(None, MarkReason.TIMEOUT if is_late else MarkReason.ALL_FAILED, counted)
    most = max(counts.values())
    winners = [value for value, count in counts.items() if count == most]
    if len(winners) > 1:
        return VoteTally(0.0, MarkReason.TIE, counted)
    return VoteTally(winners[0], MarkReason.MAJORITY, counted)


def outage(votes: Sequence[Vote]) -> InferenceError | None:
    """Return the engines' error if no vote reached one that works, so that asking again later may help."""
    errors = [vote.error for vote in votes]
    if errors and all(isinstance(error, InferenceError) and error.retryable for error in errors):
        return next(error for error in errors if isinstance(error, InferenceError))
    return None

"""The share of finished turns that kills of the service do not cost, from the engine's own record of turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine import Turn


def turns_kept(finished: Sequence[Mapping[int, int]], answered: Mapping[int, int], *, turns: int) -> float | None:
    """Return the share of finished turns that were not sampled again; None if no kill found a finished turn.

    Args:
        finished: for each kill, how often the engine had answered each rollout by then.
        answered: how often it has answered each rollout in the end; all have ended after `turns` turns.
        turns: the turns of a rollout. A rollout that had been answered so often by a kill was not interrupted.
    """
    at_stake = sum(_distinct(count, turns) for kill in finished for count in kill.values())
    again = sum(count - turns for count in answered.values())
    return 1 - again / at_stake if at_stake else None


def _distinct(count: int, turns: int) -> int:
    """Return how many turns of an interrupted rollout were at stake."""
    return count if count < turns else 0


@dataclass(frozen=True, slots=True)
class Stake:
    """The turns that were at stake when nodes were gone."""

    answered: int
    """Turns of interrupted rollouts that had been answered by then."""
    rollouts: int
    """The rollouts that had any."""
    again: int
    """Those of them that were sampled again."""

    @property
    def kept(self) -> float | None:
        """The share that was not sampled again; None if there were no turns."""
        return 1 - self.again / self.answered if self.answered else None


def turns_at_stake(rollouts: Sequence[Sequence[Turn]], moments: Sequence[tuple[float, str]], *, turns: int) -> Stake:
    """Return what was at stake when nodes were gone, and what of it was lost.

    Args:
        rollouts: the turns of each rollout in order, whichever node asked for them.
        moments: when a node was gone, in seconds of the turns' clock, and its address.
        turns: the turns of a rollout. One that had been answered so often was not interrupted.
    """
    at_stake = interrupted = again = 0
    for moment, address in moments:
        for ours in rollouts:
            before = [turn for turn in ours if turn.asked <= moment]
            answered = {turn.length for turn in before if turn.answered <= moment}
            if before and before[-1].peer == address and len(answered) < turns:
                at_stake += len(answered)
                interrupted += bool(answered)
                again += len(answered & {turn.length for turn in ours if turn.asked > moment})
    return Stake(at_stake, interrupted, again)

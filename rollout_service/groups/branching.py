"""Where the branches of a group begin in its roots: a pure function of the roots' trajectories.

No branch begins at a first turn, which would repeat its root's whole work, nor at one that sampled nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle, islice

from api_schemas.rollouts import BranchPoint
from api_schemas.runs import BranchAt
from api_schemas.trajectories import Trajectory


def branch_points(
    roots: Sequence[tuple[str, Trajectory | None]],
    count: int,
    at: BranchAt | Sequence[int],
    *,
    reuse_results: bool = False,
) -> list[BranchPoint | None]:
    """Return where each branch begins, root by root in turn; None for all of them if no root has a turn for it.

    A root with fewer turns than branches has several branches at a turn. One without a turn as `at` asks for is
    branched at its least likely turns.
    """
    found = {
        rollout_id: (trajectory, turns)
        for rollout_id, trajectory in roots
        if trajectory is not None and (turns := _turns(trajectory))
    }
    if not found:
        return [None] * count
    most = math.ceil(count / len(found))
    chosen = {rollout_id: cycle(_choose(*root, most, at)) for rollout_id, root in found.items()}
    return [
        BranchPoint(rollout_id=rollout_id, turn=next(chosen[rollout_id]), reuse_results=reuse_results)
        for rollout_id in islice(cycle(found), count)
    ]


def _turns(trajectory: Trajectory) -> dict[int, float]:
    """Return the turns at which a branch may begin, with the mean log-probability of their tokens."""
    logprobs: dict[int, list[float]] = defaultdict(list)
    for segment in trajectory.segments:
        for turn, logprob in zip(segment.turn_ids, segment.logprobs, strict=True):
            if turn >= 0:
                logprobs[turn].append(logprob)
    whole = next(turn for turn in range(len(trajectory.finish_reasons) + 1) if turn not in logprobs)
    return {turn: math.fsum(logprobs[turn]) / len(logprobs[turn]) for turn in range(1, whole)}


def _choose(trajectory: Trajectory, turns: Mapping[int, float], most: int, at: BranchAt | Sequence[int]) -> list[int]:
    """Return at most `most` turns, and at least one."""
    match at:
        case BranchAt.UNCERTAIN:
            chosen: Sequence[int] = []
        case BranchAt.SPREAD:
            chosen = _spread(sorted(turns), min(most, len(turns)))
        case BranchAt.TOOL_ERROR:
            chosen = trajectory.tool_error_turns
        case BranchAt.PROPOSED:
            chosen = trajectory.proposed_turns
        case _:
            chosen = at
    possible = [turn for turn in chosen if turn in turns]
    return (possible or sorted(turns, key=lambda turn: (turns[turn], turn)))[:most]


def _spread(turns: Sequence[int], count: int) -> list[int]:
    return [turns[(2 * number + 1) * len(turns) // (2 * count)] for number in range(count)]

"""Branches: rollouts that play the first turns of an earlier one again, then go their own way.

The ids, log-probabilities and versions of the earlier turns are those of the rollout that sampled them. The first new
turn answers the very prompt that it had there; a rollout whose tools give another one fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import anyio.to_thread

from api_schemas.errors import Boundary
from api_schemas.external import AgentKind
from api_schemas.rollouts import BranchPoint, Rollout, RolloutRequest, Stage
from api_schemas.rollouts.sessions import RolloutKind
from api_schemas.trajectories import FinishReason, Message, Segment, Trajectory
from rollout_service.base.errors import ServiceError
from rollout_service.engines.contract import Generation
from rollout_service.engines.serving.replay import split_turns, was_edited
from rollout_service.engines.serving.saved_turns import SavedTurn
from rollout_service.engines.serving.turn_log import AnewReason
from rollout_service.environments.contract import Environment
from rollout_service.store.contract import Store
from rollout_service.tokens.trajectory import train_on

MAX_DEPTH = 64
"""Branches of branches whose masked turns are read from where they were sampled."""

_PROGRAM = "a program is the agent, and its turns cannot be played again"


class BranchError(ServiceError):
    """A rollout cannot begin where its `branch_of` says; `field` is the one at fault."""

    code = "branch_refused"
    boundary = Boundary.REQUEST
    status = 422

    def __init__(self, field: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field


class BranchDivergedError(ServiceError):
    """The earlier turns could not be played again as they were."""

    code = "branch_diverged"
    boundary = Boundary.ENVIRONMENT

    def __init__(self, branch: BranchPoint, played: int, reason: AnewReason) -> None:
        super().__init__(
            f"turn {played} is not reached as in rollout {branch.rollout_id}: {reason}",
            hint="Set `reuse_results` if tools answer the same calls with other texts. The model has to have the same "
            "tokenizer and chat format. Compare the messages of both rollouts up to this turn.",
        )


@dataclass(frozen=True, slots=True)
class EarlierTurns:
    """Turns of other rollouts up to that of a branch."""

    turns: Sequence[SavedTurn] = ()
    results: Sequence[list[Message]] = ()
    """Shown to the model for each turn but the last; empty to show those of now."""


def why_unbranched(environment: Environment) -> str | None:
    """Return the reason; None if rollouts can be branched."""
    if environment.uses_gateway:
        return _PROGRAM
    if environment.spec.parallel is not None:
        return "the agent has sub-agents, whose turns are not played again"
    if environment.replayable == "never":
        return "the environment declares that its turns cannot be played again"
    return None


def check_branch(request: RolloutRequest, environment: Environment) -> None:
    why = why_unbranched(environment)
    if request.agent is AgentKind.EXTERNAL:
        why = _PROGRAM
    if why is not None:
        raise BranchError("", why)
    exports = request.exports
    if exports.top_logprobs or exports.prompt_logprobs or exports.routed_experts:
        raise BranchError("", "the numbers per token of `exports` are not known for the turns before a branch")


async def earlier_turns(store: Store, request: RolloutRequest, branch: BranchPoint) -> EarlierTurns:
    """Return the turns up to the branch's, from the trajectories that sampled them.

    Their `worked_seconds` are those of all rollouts that they are from.

    Raises:
        BranchError: The earlier rollout has no such turns, or is another task's.
    """
    chain: list[tuple[Trajectory, int]] = []
    seconds, step = 0.0, branch
    while True:
        source, trajectory = await _read(store, request, step)
        chain.append((trajectory, step.turn + (not chain)))
        seconds += sum(span.seconds for span in source.spans if span.stage is Stage.ROLLOUT)
        if source.branch_of is None or source.branch_of.train_prefix:
            break
        if len(chain) == MAX_DEPTH:
            raise BranchError("rollout_id", f"it is a branch of a branch, over {MAX_DEPTH} times")
        step = source.branch_of
    turns = await anyio.to_thread.run_sync(_turns_of, chain[::-1])
    if len(turns) <= branch.turn:
        raise BranchError(
            "turn",
            f"turn {len(turns)} of rollout {branch.rollout_id} sampled no token, and cannot be played again",
            hint="Choose a turn before that one.",
        )
    last, kept = chain[0][0], frozenset(chain[0][0].kept_kv_versions if branch.train_prefix else ())
    results = _results_in(last, branch.turn) if branch.reuse_results else []
    return EarlierTurns([turn.saved(last.finish_reasons[turn.number], kept, seconds) for turn in turns], results)


def _results_in(trajectory: Trajectory, turn: int) -> list[list[Message]]:
    """Return the tools' results of each turn before one, as the model saw them.

    Raises:
        BranchError: The conversation at the end of the rollout has not all of its turns.
    """
    if was_edited(trajectory):
        raise BranchError(
            "reuse_results", "the rollout's history was shortened, so the results of its tools are not known"
        )
    return [before for before, _ in split_turns(trajectory.messages)[1 : turn + 1]]


def without_earlier_turns(trajectory: Trajectory, branch: BranchPoint) -> Trajectory:
    """Set mask 0 on the turns before the branch, unless they are to be trained on."""
    if branch.train_prefix:
        return trajectory
    turns = {turn for segment in trajectory.segments for turn in segment.turn_ids if turn >= branch.turn}
    return train_on(trajectory, turns)


async def _read(store: Store, request: RolloutRequest, branch: BranchPoint) -> tuple[Rollout, Trajectory]:
    source = await store.get(branch.rollout_id)
    if source is None:
        raise BranchError("rollout_id", f"there is no rollout {branch.rollout_id}")
    if not source.state.terminal:
        raise BranchError("rollout_id", f"rollout {source.rollout_id} has not ended", hint="Wait until it has.")
    if source.task != request.task or source.kind is not RolloutKind.TASK or source.program is not None:
        raise BranchError(
            "rollout_id",
            f"rollout {source.rollout_id} is not an attempt of the built-in agent at this task",
            hint="Send the same `task` as the earlier rollout had.",
        )
    trajectory = await store.trajectory(branch.rollout_id)
    if trajectory is None:
        raise BranchError("rollout_id", f"the tokens of rollout {source.rollout_id} are not stored")
    if branch.turn >= len(trajectory.finish_reasons):
        count = len(trajectory.finish_reasons)
        raise BranchError("turn", f"rollout {source.rollout_id} has {count} turns, counted from 0")
    return source, trajectory


@dataclass(frozen=True, slots=True)
class _EarlierTurn:
    number: int
    segment: Segment
    recorded: int
    """Ids of its segment before its prompt."""
    begin: int
    end: int

    def saved(self, finish_reason: FinishReason, kept_kv_versions: frozenset[int], seconds: float) -> SavedTurn:
        segment, sampled = self.segment, slice(self.begin, self.end)
        generation = Generation(
            output_ids=segment.token_ids[sampled],
            logprobs=segment.logprobs[sampled],
            versions=segment.versions[sampled],
            finish_reason=finish_reason,
            prompt_tokens=0,  # this rollout sends it to no engine
            cached_tokens=0,
            kept_kv_versions=kept_kv_versions,
            backend_id="",
            engine_seconds=0.0,
        )
        return SavedTurn(None, segment.token_ids[self.recorded : self.begin], generation, seconds)


def _turns_of(chain: Sequence[tuple[Trajectory, int]]) -> list[_EarlierTurn]:
    """Join the turns of an unmasked trajectory up to a number, those of the branch from there, and so on."""
    turns: list[_EarlierTurn] = []
    for trajectory, end in chain:
        turns = turns[:end]
        last = turns[-1] if turns else None
        for segment in trajectory.segments:
            for turn in _turns_in(segment, last):
                if turn.number == len(turns) < end:
                    turns.append(turn)
            last = None
    return turns


def _turns_in(segment: Segment, last: _EarlierTurn | None) -> Iterator[_EarlierTurn]:
    position = recorded = 0
    if last is not None and segment.token_ids[: last.end] == last.segment.token_ids[: last.end]:
        recorded = last.end
    for number, run in groupby(segment.turn_ids):
        begin, position = position, position + sum(1 for _ in run)
        if number >= 0:
            yield _EarlierTurn(number, segment, recorded, begin, position)
            recorded = position

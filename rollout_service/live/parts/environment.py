"""The environment `session`: its rollouts are parts of sessions that were served before.

Nothing is sampled. A rollout gets the same part at every attempt, and no other rollout gets it. The trajectory has the
ids that were served, with mask 1 on the part's usable turns alone; the reward is the mean of their values. Tasks of it
come from the service alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum

import anyio
import anyio.to_thread
from pydantic import JsonValue

from api_schemas.nodes import NodeState
from api_schemas.rollouts import RolloutRequest, StopReason, Usage
from api_schemas.rollouts.sessions import ClosedBecause, Hint, SessionInfo, TurnMark
from api_schemas.trajectories import Message, Trajectory
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.base.ids import SampleId
from rollout_service.environments.contract import Environment, EnvironmentSpec, EvaluateIn
from rollout_service.episodes import Episode, Score, UndrivenPolicy
from rollout_service.live import replay
from rollout_service.live.contract import PartRecord, SessionRecord, TurnRecord
from rollout_service.live.judging.teacher import TeacherReader
from rollout_service.live.parts.delivery import ENVIRONMENT, order_of, parts_named
from rollout_service.live.serving.views import mark_of, time_of
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.pipeline.attempt import ElsewhereError
from rollout_service.store.cluster_contract import ClusterStore
from rollout_service.store.runs_contract import RunStore
from rollout_service.tokens import ChatRenderer
from rollout_service.tokens.trajectory import train_on

ELSEWHERE_SECONDS = 0.5
"""Before a node gives back another node's part, for that one to lease."""
LOST_SECONDS = 900.0
"""How long a part waits for a node that is dead or has left: long enough to restart its host."""


class PartGoneError(EnvironmentFailedError):
    """A rollout has no part of a session: it was deleted, or belongs to another rollout."""

    code = "session_part_gone"


@dataclass(frozen=True, slots=True)
class PartPolicy(UndrivenPolicy):
    """A part of a session; implements `episodes.Policy`."""

    info: SessionInfo
    marks: list[TurnMark]
    recorded: Trajectory
    usage: Usage
    stop_reason: StopReason
    answer: str
    engine_seconds: float = 0.0

    def refusal(self) -> EnvironmentFailedError:
        return EnvironmentFailedError("a session that was served before is not sampled again")

    @property
    def messages(self) -> list[Message]:
        return self.recorded.messages

    def trajectory(self) -> Trajectory:
        return self.recorded


@dataclass(eq=False)
class SessionParts:
    """Implements `environments.contract.RecordedPolicies`."""

    store: SqliteLiveStore
    runs: RunStore
    renderer_of: Callable[[str], ChatRenderer]
    """Raises NoBackendError if the pool is not served."""
    teacher: TeacherReader | None = None
    node: str | None = None
    """This node, if others share the store of runs."""
    cluster: ClusterStore | None = None
    """The nodes that share it."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._away_since: dict[str, float] = {}
        """When each node was missed first that parts wait for."""

    async def open(self, request: RolloutRequest) -> PartPolicy:
        """Return the part of a rollout, or claim one.

        Raises:
            PartGoneError: There is none for it, its session was deleted, or the session's node is lost.
            ElsewhereError: Another node has the session.
            NoBackendError: The session's pool is not served.
            RecordLostError: A turn cannot be read.
        """
        if (node := request.task.instance.get("node")) != self.node:
            if self.cluster is not None and await self._is_lost(str(node), self.cluster):
                raise _gone(request)
            await anyio.sleep(ELSEWHERE_SECONDS)
            raise ElsewhereError(request.pool)
        part = await self._claim(request)
        session = await self.store.session(part.session_id)
        turns = await self.store.turns(part.session_id)
        own = [turn for turn in turns if turn.part == part.part]
        if session is None or not own or session.closed_because is ClosedBecause.DELETED:
            raise _gone(request)
        renderer = self.renderer_of(session.pool)
        until = [turn for turn in turns if turn.turn <= max(part.usable)]
        trajectory = await anyio.to_thread.run_sync(_trajectory, renderer, until, part.usable)
        marks = await self._marks(request, session, part, own, trajectory)
        usable = [turn for turn in own if turn.turn in part.usable]
        return PartPolicy(
            info=_info(session, part),
            marks=marks,
            recorded=trajectory,
            usage=_usage(usable, trajectory),
            stop_reason=StopReason.TRUNCATED if usable[-1].truncated else StopReason.ANSWERED,
            answer=usable[-1].answer,
        )

    async def _is_lost(self, node: str, cluster: ClusterStore) -> bool:
        present = {one.report.name for one in await cluster.nodes() if one.state is not NodeState.DEAD}
        self._away_since = {name: at for name, at in self._away_since.items() if name not in present}
        if node in present:
            return False
        return self.clock() >= self._away_since.setdefault(node, self.clock()) + LOST_SECONDS

    async def _claim(self, request: RolloutRequest) -> PartRecord:
        try:
            sample = SampleId.parse(request.rollout_id or "")
        except ValueError:
            raise _gone(request) from None
        named = set(parts_named(request.task.instance))
        found = [part for name, _ in named for part in await self.store.parts(session_id=name)]
        own = [
            (part.session_id, part.part)
            for part in found
            if (part.session_id, part.part) in named and (part.run_id, part.offset) == (sample.run, sample.number)
        ]
        first_id = str(SampleId(sample.run, sample.number, sample.sample))
        part = await self.store.claim(sorted(set(own)), first_id)
        if part is None:
            raise _gone(request)
        return part

    async def _marks(
        self,
        request: RolloutRequest,
        session: SessionRecord,
        part: PartRecord,
        turns: Sequence[TurnRecord],
        trajectory: Trajectory,
    ) -> list[TurnMark]:
        order = order_of(await self.runs.get(SampleId.parse(request.rollout_id or "").run))
        marks = await anyio.to_thread.run_sync(_unread_marks, part, turns, order.next_state)
        if not order.teacher or self.teacher is None:
            return marks
        taught: dict[int, TurnMark] = {}

        async def ask(mark: TurnMark, hint: Hint, teacher: TeacherReader) -> None:
            sampled = _sampled(trajectory, mark.turn)
            reading = await teacher.read(session.pool, hint.prompt_ids, sampled)
            if reading.teacher is not None:
                taught[mark.turn] = mark.model_copy(update={"teacher": reading.teacher})

        async with anyio.create_task_group() as tasks:
            for mark in marks:
                if mark.usable and mark.hint is not None:
                    tasks.start_soon(ask, mark, mark.hint, self.teacher)
        return [taught.get(mark.turn, mark) for mark in marks]


class SessionEnvironment(Environment):
    spec = EnvironmentSpec(
        name=ENVIRONMENT,
        description="Parts of live sessions, which the service hands to runs with `live`.",
        evaluate_in=EvaluateIn.NONE,
    )
    replayable = "answer"

    def __init__(self, parts: SessionParts) -> None:
        self.recorded = parts

    def check(self, instance: dict[str, JsonValue]) -> None:
        _ = instance
        raise InvalidFieldError.at(
            "environment",
            "the service alone makes tasks of live sessions",
            hint="Create a run with `live`; it gets the parts of sessions by itself.",
        )

    async def init(self, episode: Episode) -> None:
        if isinstance(episode.policy, PartPolicy):
            episode.session = episode.policy.info
            episode.turn_marks = list(episode.policy.marks)
            episode.answer = episode.policy.answer

    async def run(self, episode: Episode) -> StopReason:
        """Return why the last turn ended: the agent has done its work before."""
        if not isinstance(episode.policy, PartPolicy):
            raise EnvironmentFailedError("a session that was served before is not sampled again")
        return episode.policy.stop_reason

    async def evaluate(self, episode: Episode) -> Score:
        values = [mark.value for mark in episode.turn_marks if mark.usable and mark.value is not None]
        if not values:
            raise EnvironmentFailedError("no turn of this part of a session has a value")
        return Score(fsum(values) / len(values))


def _gone(request: RolloutRequest) -> PartGoneError:
    return PartGoneError(
        f"rollout {request.rollout_id} has no part of a live session",
        hint="Its session was deleted, its node is gone, or the rollout is none of a run with `live`.",
    )


def _trajectory(renderer: ChatRenderer, turns: Sequence[TurnRecord], usable: Sequence[int]) -> Trajectory:
    return train_on(replay.rebuild(renderer, turns).trajectory(), usable)


def _unread_marks(part: PartRecord, turns: Sequence[TurnRecord], with_text: bool) -> list[TurnMark]:
    """Return the marks before a teacher has read them. Slow for long texts, which are hashed."""
    usable = frozenset(part.usable)
    return [
        mark_of(
            turn,
            usable=turn.turn in usable,
            because=None if turn.turn in usable else turn.dropped,
            with_text=with_text,
        )
        for turn in turns
    ]


def _sampled(trajectory: Trajectory, turn: int) -> list[int]:
    return [
        token
        for segment in trajectory.segments
        for token, of in zip(segment.token_ids, segment.turn_ids, strict=True)
        if of == turn
    ]


def _usage(turns: Sequence[TurnRecord], trajectory: Trajectory) -> Usage:
    chosen = {turn.turn for turn in turns}
    return Usage(
        turns=len(turns),
        prompt_tokens=sum(
            segment.turn_ids.index(turn)
            for segment in trajectory.segments
            for turn in chosen.intersection(segment.turn_ids)
        ),
        sampled_tokens=sum(sum(segment.loss_mask) for segment in trajectory.segments),
        tool_calls=sum(len(turn.calls) for turn in turns),
        malformed_calls=sum(turn.malformed for turn in turns),
    )


def _info(session: SessionRecord, part: PartRecord) -> SessionInfo:
    return SessionInfo(
        session_id=session.session_id,
        user=session.user,
        tenant=session.tenant,
        continues=session.continues,
        closed_because=session.closed_because,
        opened_at=time_of(session.opened_at),
        closed_at=None if session.closed_at is None else time_of(session.closed_at),
        part=part.part,
    )

"""A run that is in progress, its history and its groups, and a live session, valid by the API's schema."""

import math
from datetime import datetime, timedelta
from typing import Any

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import RolloutState
from api_schemas.rollouts.sessions import MarkReason, MaskReason, NextState, TurnMark, Votes
from api_schemas.runs import InlineTasks, Run, RunCounts, RunPage, RunRequest, RunState
from api_schemas.runs.history import GroupPage, GroupRow, GroupSampleRow, RunHistory
from api_schemas.sessions import LiveSession, SessionCounts, SessionPage, SessionPart, SessionState
from api_schemas.tasks import Task
from tests.support.browser.canned import now

RUN = "math-grpo-7"
DROPPED = {"zero_variance": 310, "stale": 4, "cancelled": 2}


def run(state: RunState = RunState.RUNNING, **changes: Any) -> Run:
    """Return a run; a paused one has a problem."""
    problem = ErrorInfo(
        code="task_file_changed",
        message="the file /data/math.jsonl has changed since the run began",
        hint="Put the old file back and resume the run, or end it.",
        boundary=Boundary.REQUEST,
        retryable=False,
    )
    source = InlineTasks(tasks=[Task(environment="math", instance={})])
    fields = {
        "run_id": RUN,
        "state": state,
        "request": RunRequest(run_id=RUN, source=source, group_size=8, batch_size=16),
        "version": 42,
        "tasks": 7_500,
        "cursor": 2_114,
        "acceptance_rate": 0.63,
        "counts": RunCounts(
            open=9,
            ready=5,
            batched=16,
            acknowledged=1_204,
            dropped=DROPPED,
            samples_masked=51,
            samples_stale=12,
            samples_retried=88,
            batches_acknowledged=75,
        ),
        "problem": problem if state is RunState.PAUSED else None,
        "created_at": now() - timedelta(hours=5),
    }
    return Run(**fields | changes)


def runs() -> RunPage:
    """Return three runs, the oldest first."""
    ended = run(RunState.FINISHED, run_id="code-sft-0", acceptance_rate=0.91, ended_at=now())
    paused = run(RunState.PAUSED, run_id="code-dapo-2", acceptance_rate=0.01)
    return RunPage(runs=[ended, paused, run()])


def history(points: int = 120) -> RunHistory:
    """Return a run that learns, with one interval in which nothing is known."""

    def curve(low: float, high: float, wave: float = 0.0) -> list[float | None]:
        values = [low + (high - low) * (1 - math.exp(-3 * n / points)) + wave * math.sin(n / 4) for n in range(points)]
        return [None if n == points // 2 else value for n, value in enumerate(values)]

    shares = {"queued": 0.12, "init": 0.08, "engine": 0.5, "tool": 0.17, "rollout": 0.05, "evaluate": 0.08}
    begun = now() - timedelta(hours=5)
    return RunHistory(
        run_id=RUN,
        at=[begun + timedelta(minutes=2.5 * n) for n in range(points)],
        groups=[10] * points,
        reward_mean=curve(0.21, 0.74, 0.02),
        reward_std=curve(0.32, 0.24, 0.01),
        acceptance=curve(0.35, 0.65, 0.03),
        staleness=curve(0.8, 1.3, 0.2),
        turns=curve(6.1, 4.2, 0.2),
        tokens=curve(2_400, 1_650, 60),
        failed=curve(0.05, 0.01, 0.002),
        stage_shares={name: [share] * points for name, share in shares.items()},
        dropped={"zero_variance": [3] * points},
    )


def group(number: int, at: datetime) -> GroupRow:
    """Return a group: the newest are open, and every fifth of the others is dropped."""
    is_open, is_dropped = number > 2_108, number % 5 == 0
    samples = []
    for sample in range(8):
        state, reward, error = RolloutState.COMPLETED, round(((number * 7 + sample * 5) % 11) / 10, 3), None
        if is_open and sample > 2:
            state, reward = RolloutState.ROLLOUT, None
        elif sample == 7 and number % 3 == 0:
            state, reward, error = RolloutState.FAILED, None, "sandbox_out_of_memory"
        elif is_dropped:
            reward = 1.0
        samples.append(
            GroupSampleRow(
                rollout_id=f"{RUN}.{number}.{sample}",
                sample=sample,
                state=state,
                reward=reward,
                error_code=error,
                tokens=None if reward is None else 1_500 + 10 * sample,
            )
        )
    state = "open" if is_open else "dropped" if is_dropped else "acknowledged"
    return GroupRow(
        number=number,
        state=state,
        reason="zero_variance" if state == "dropped" else None,
        batch=number // 28 if state == "acknowledged" else None,
        environment="math",
        reward_mean=None if is_open else 0.52,
        reward_std=None if is_open else 0.0 if is_dropped else 0.31,
        closed_at=None if is_open else at - timedelta(seconds=9 * (2_113 - number)),
        samples=samples,
    )


def groups(newest: int = 2_113, count: int = 100, cursor: str | None = "next") -> GroupPage:
    """Return a page of groups, the newest first."""
    at = now()
    return GroupPage(groups=[group(newest - n, at) for n in range(count)], next_cursor=cursor)


def session(name: str = "s-4711", state: SessionState = SessionState.OPEN) -> LiveSession:
    """Return a session without its turns."""
    return LiveSession(
        session_id=name,
        state=state,
        pool="policy",
        user="8f14e45fceea167a5a36dedd4bea2543",
        tenant="acme",
        train=True,
        opened_at=now() - timedelta(minutes=42),
        used_at=now() - timedelta(seconds=20),
        parts=2,
        counts=SessionCounts(served=31, recorded=31, judged=24, delivered=18, waiting=5, dropped={MaskReason.SIDE: 8}),
    )


def whole_session() -> LiveSession:
    """Return a session with turns of every kind, and two parts."""
    follow = NextState(role="user", chars=412, sha256="0" * 64)
    turns = [
        TurnMark(
            turn=0,
            usable=True,
            value=1.0,
            reason=MarkReason.MAJORITY,
            source="judge",
            votes=Votes(plus=3),
            next_state=follow,
        ),
        TurnMark(turn=1, usable=False, masked_because=MaskReason.SIDE),
        TurnMark(turn=2, usable=True, value=-1.0, reason=MarkReason.EXPLICIT, source="explicit"),
        TurnMark(turn=3, usable=False),
    ]
    parts = [
        SessionPart(part=0, run_id="live-1", rollout_id="live-1.3.0", turns=[0, 2], closed_at=now()),
        SessionPart(part=1, run_id="live-1", turns=[], closed_at=now()),
    ]
    return session().model_copy(update={"turns": turns, "handed_over": parts})


def sessions() -> SessionPage:
    """Return an open and a closed session."""
    closed = session("s-4710", SessionState.CLOSED)
    return SessionPage(sessions=[session(), closed], counts=session().counts)

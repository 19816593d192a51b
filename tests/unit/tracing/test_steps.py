"""The steps of attempts: encoded, saved in the background, and read again."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts import RolloutRequest
from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import RolloutAttempts, StepKind
from api_schemas.tasks import Task
from rollout_service.activity import Activity, ActivityBoard, OpenStep, in_lane, note_outcome, waits_for
from rollout_service.base.errors import StoreError
from rollout_service.observability.tracing import steps as steps_module
from rollout_service.observability.tracing.steps import StepArchive, StepWriter
from rollout_service.store import retrying
from rollout_service.store.contract import EncodedSteps
from rollout_service.store.sqlite import SqliteStore


@asynccontextmanager
async def parts() -> AsyncIterator[tuple[SqliteStore, ActivityBoard, StepArchive]]:
    async with await SqliteStore.open(":memory:") as store:
        for name in ("r1", "r2"):
            request = RolloutRequest(rollout_id=name, task=Task(environment="calc", instance={}))
            await store.submit(request)
        board, saves = ActivityBoard(), StepWriter(store)
        board.observe(saves)
        async with saves.running():
            yield store, board, StepArchive(store, board, saves)


def work(board: ActivityBoard, rollout_id: str = "r1", attempt: int = 1) -> Activity:
    """Do what an attempt does, in no time."""
    with board.working(rollout_id, attempt=attempt, environment="calc", run_id="a", group=4) as activity:
        with waits_for(StepKind.STORE, "before"):
            pass
        activity.enter_stage(Stage.INIT)
        with waits_for(StepKind.WORKER, "init"):
            pass
        activity.enter_stage(Stage.ROLLOUT)
        with waits_for(StepKind.ENGINE, "e1", turn=0, request="q", none=None) as step:
            step.note(tokens=7)
        with pytest.raises(TimeoutError), in_lane("call-1"), waits_for(StepKind.TOOL, "bash", command="ls"):
            raise TimeoutError
        note_outcome(state="completed", reward=1.0, code=None)
    return activity


async def test_the_steps_of_an_attempt_are_read_as_they_were():
    async with parts() as (_, board, archive):
        activity = work(board)
        found = await archive.of_rollout("r1")
    assert [(step.kind, step.name, step.lane, step.stage, step.error, step.detail) for step in found.steps] == [
        (StepKind.STORE, "before", "", None, None, {}),
        (StepKind.WORKER, "init", "", Stage.INIT, None, {}),
        (StepKind.ENGINE, "e1", "", Stage.ROLLOUT, None, {"turn": 0, "request": "q", "tokens": 7}),
        (StepKind.TOOL, "bash", "call-1", Stage.ROLLOUT, "internal_error", {"command": "ls"}),
    ]
    assert {step.attempt for step in found.steps} == {1}
    for step, kept in zip(found.steps, activity.ended, strict=True):
        at = activity.started_at + kept.started - activity.started
        assert step.started_at.timestamp() == pytest.approx(at, abs=2e-6)
        assert step.seconds == pytest.approx(kept.ended - kept.started, abs=2e-6)  # type: ignore[operator]


async def test_what_has_just_ended_is_found_and_every_attempt_once():
    async with parts() as (store, board, archive):
        work(board, attempt=1)
        assert len((await archive.of_rollout("r1")).steps) == 4
        work(board, attempt=2)
        assert len(await store.saved_steps(["r1"])) == 1
        found = await archive.of_rollout("r1")
        assert [step.attempt for step in found.steps] == [1] * 4 + [2] * 4


async def test_a_live_attempt_shows_what_has_ended_so_far():
    async with parts() as (_, board, archive):
        work(board)
        with board.working("r1", attempt=2, environment="calc"), waits_for(StepKind.SETUP):
            with waits_for(StepKind.TOOL):
                pass
            found = await archive.of_rollout("r1")
            (line,) = [line async for line in archive.lines(["r1", "r2"])]
        assert [step.kind for step in found.steps][-1] is StepKind.TOOL
        attempts = RolloutAttempts.model_validate_json(line).attempts
        assert [(one.attempt, one.outcome) for one in attempts] == [
            (1, {"state": "completed", "reward": 1.0}),
            (2, {}),
        ]
        assert (attempts[0].run_id, attempts[0].group) == ("a", 4)


async def test_unknown_rollouts_have_no_steps():
    async with parts() as (_, board, archive):
        work(board, "unknown")
        assert (await archive.of_rollout("unknown")).steps == []
        assert [line async for line in archive.lines(["unknown", "r2"])] == []


async def test_the_end_of_the_service_saves_the_last_steps():
    async with await SqliteStore.open(":memory:") as store:
        await store.submit(RolloutRequest(rollout_id="r1", task=Task(environment="calc", instance={})))
        board, saves = ActivityBoard(), StepWriter(store)
        board.observe(saves)
        async with saves.running():
            work(board)
        assert len((await store.saved_steps(["r1"]))["r1"]) == 1


class FailingStore:
    """A store that fails at first."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.saved: list[str] = []
        self.shards = [self]

    def shard_of(self, _: str) -> int:
        return 0

    async def save_steps(self, attempts: Sequence[EncodedSteps]) -> int:
        if self.failures:
            self.failures -= 1
            raise StoreError("the disk is full")
        self.saved += [one.rollout_id for one in attempts]
        return len(attempts)


async def test_a_store_that_fails_is_asked_again(monkeypatch):
    monkeypatch.setattr(retrying, "STORE_RETRY_SECONDS", 0.01)
    store, board = FailingStore(2), ActivityBoard()
    saves = StepWriter(store)  # type: ignore[arg-type]
    board.observe(saves)
    async with saves.running():
        work(board)
        work(board, "r2")
        with anyio.fail_after(5):
            await saves.flush()
    assert store.saved == ["r1", "r2"]


async def test_memory_is_bounded_while_the_store_fails(monkeypatch):
    monkeypatch.setattr(steps_module, "MAX_WAITING", 3)
    saves, board = StepWriter(FailingStore(0)), ActivityBoard()  # type: ignore[arg-type]
    board.observe(saves)
    for _ in range(5):
        work(board)
    assert saves.dropped == 2


TEXT = st.text(st.characters(), max_size=20)
VALUES = st.recursive(
    st.none() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


@given(
    st.lists(
        st.tuples(st.sampled_from(StepKind), TEXT, TEXT, st.none() | TEXT, st.dictionaries(TEXT, VALUES, max_size=3)),
        max_size=8,
    )
)
def test_any_step_can_be_encoded(steps):
    activity = anyio.run(_recorded, steps)
    record = steps_module.decompress(steps_module.compress(steps_module.encode(activity)))
    assert isinstance(json.loads(record), dict)
    found = steps_module.rows(steps_module.decode(record))
    clean = [(kind, *(_clean(text) for text in (name, lane))) for kind, name, lane, _, _ in steps]
    assert [(step.kind, step.name, step.lane) for step in found] == clean
    errors = [None if error is None else _clean(error) for *_, error, _ in steps]
    assert [step.error for step in found] == (errors if any(errors) else [None] * len(steps))


def _clean(text: str) -> str:
    return text.encode(errors="replace").decode()


async def _recorded(steps: list[tuple[StepKind, str, str, str | None, dict[str, object]]]) -> Activity:
    activity = Activity("r1", attempt=1, environment="calc")
    for kind, name, lane, error, detail in steps:
        step = OpenStep(kind, name, lane, None, dict(detail))
        activity.begin(step)
        activity.end(step, None)
        step.error = error
    return activity

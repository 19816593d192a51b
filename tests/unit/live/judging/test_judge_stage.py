"""Every turn that may be judged is judged once, through restarts; nothing that a judge does stops the others."""

from collections.abc import AsyncIterator

import anyio
import pytest

from api_schemas.rollouts.sessions import Hint, MarkReason, TurnKind
from rollout_service.base.errors import StoreError
from rollout_service.engines.errors import BackendUnreachable
from rollout_service.live.contract import TurnMarkRecord, TurnRecord, UnjudgedTurn
from rollout_service.live.judging.stage import FoundHint, JudgeStage
from rollout_service.live.sqlite.store import SqliteLiveStore
from tests.support.live.judge import MarksSeen, ServedPools, a_judge, judging
from tests.support.live.store import a_session, a_state, a_turn, explicit
from tests.support.sampling import ScriptedSampler
from tests.support.waiting import until
from tests.unit.live.judging.test_hindsight import finder

GOOD, BAD = r"\boxed{1}", r"\boxed{-1}"


@pytest.fixture
async def store() -> AsyncIterator[SqliteLiveStore]:
    async with SqliteLiveStore(":memory:") as opened:
        yield opened


async def add(store: SqliteLiveStore, *turns: int, session_id: str = "s", **values: object) -> None:
    """Add delivered turns with a next state."""
    await store.open(a_session(session_id))
    for turn in turns:
        await store.record(a_turn(turn, session_id, **values))
        await store.deliver(session_id, turn)
        await store.follow(session_id, turn, a_state(f"state {turn}", at=float(turn)))


def make_stage(store: SqliteLiveStore, sampler: ScriptedSampler, seen: MarksSeen, **settings: object) -> JudgeStage:
    pools = settings.pop("pools", None) or ServedPools("judge")
    at_once, queue = settings.pop("at_once", 4), settings.pop("queue", 16)
    judge = a_judge(sampler, **{"votes": 1, **settings})
    return JudgeStage(store, judge, pools, at_once=at_once, queue=queue, on_mark=seen.judged, retry_seconds=0.01)  # type: ignore[arg-type]


async def test_turns_are_judged_when_they_arrive_and_never_twice(store):
    sampler, seen = ScriptedSampler(GOOD), MarksSeen()
    stage = make_stage(store, sampler, seen)
    await add(store, 0, 1, 2)
    async with judging(stage):
        await seen.wait_for(3)
        await add(store, 3)
        stage.wake()
        await seen.wait_for(4)
        for _ in range(3):
            stage.wake()
            await anyio.wait_all_tasks_blocked()
    assert sorted(turn for _, turn, _ in seen.marks) == [0, 1, 2, 3]
    assert len(sampler.prompts) == 4
    assert stage.waiting == 0
    turn = await store.turn("s", 3)
    assert turn.mark.value == 1.0


async def test_what_may_not_be_judged_is_not(store):
    sampler, seen = ScriptedSampler(GOOD), MarksSeen()
    await add(store, 0, kind=TurnKind.SIDE)
    await store.record(a_turn(1))
    await store.deliver("s", 1)
    await store.record(a_turn(2))
    await store.follow("s", 2, a_state())
    await add(store, 3)
    await store.mark("s", 3, explicit(-1.0))
    await add(store, 4)
    async with judging(make_stage(store, sampler, seen)):
        await seen.wait_for(1)
    assert [turn for _, turn, _ in seen.marks] == [4]
    assert len(sampler.prompts) == 1


async def test_at_most_so_many_are_judged_and_held_in_memory(store):
    sampler, seen = ScriptedSampler(GOOD), MarksSeen()
    stage = make_stage(store, sampler, seen, at_once=3, queue=4)
    await add(store, *range(40))
    most = 0

    def note(turn: TurnRecord, mark: TurnMarkRecord) -> None:
        nonlocal most
        most = max(most, stage.waiting)
        seen.judged(turn, mark)

    stage.on_mark = note
    async with judging(stage):
        await seen.wait_for(40)
    assert sampler.most_at_once <= 3
    assert 0 < most <= 7
    assert sorted(turn for _, turn, _ in seen.marks) == list(range(40))


async def test_a_hung_judge_marks_its_turn_and_holds_up_only_a_worker(store):
    sampler, seen = ScriptedSampler(None, GOOD, GOOD, GOOD), MarksSeen()
    await add(store, *range(4))
    async with judging(make_stage(store, sampler, seen, at_once=2, vote_seconds=0.2)):
        marks = await seen.wait_for(4)
    assert [mark.value for mark in marks] == [1.0, 1.0, 1.0, None]
    assert marks[-1].reason is MarkReason.TIMEOUT


async def test_without_an_engine_turns_wait_unless_they_are_deleted_meanwhile(store):
    sampler, seen, pools = ScriptedSampler(GOOD), MarksSeen(), ServedPools()
    sampler.is_served = False
    await add(store, *range(6))
    await add(store, 0, session_id="deleted")
    async with judging(make_stage(store, sampler, seen, pools=pools)):
        await anyio.sleep(0.1)
        assert seen.marks == []
        assert len(await store.to_judge(10)) == 7
        await store.delete(session_id="deleted")
        sampler.is_served = True
        pools.serve("policy", "judge")
        await seen.wait_for(6)
    assert {session for session, _, _ in seen.marks} == {"s"}


async def test_engines_that_fail_are_tried_again_and_then_leave_a_reason(store):
    gone = BackendUnreachable("gone")
    sampler, seen = ScriptedSampler(gone, gone, GOOD), MarksSeen()
    await add(store, 0)
    async with judging(make_stage(store, sampler, seen)):
        [mark] = await seen.wait_for(1)
    assert mark.value == 1.0
    sampler, seen = ScriptedSampler(gone), MarksSeen()
    await add(store, 1)
    async with judging(make_stage(store, sampler, seen)):
        [mark] = await seen.wait_for(1)
    assert (mark.value, mark.reason, len(sampler.prompts)) == (None, MarkReason.ALL_FAILED, 3)


async def test_what_was_being_judged_when_the_service_ended_is_judged_by_the_next(tmp_path):
    path = tmp_path / "live.sqlite3"
    async with SqliteLiveStore(path) as store:
        await add(store, 0, 1, 2)
        sampler = ScriptedSampler(None)
        async with judging(make_stage(store, sampler, MarksSeen())):
            while len(sampler.prompts) < 3:
                await sampler.asked.wait()
    async with SqliteLiveStore(path) as store:
        seen = MarksSeen()
        async with judging(make_stage(store, ScriptedSampler(BAD), seen)):
            marks = await seen.wait_for(3)
        assert [mark.value for mark in marks] == [-1.0] * 3


async def test_feedback_that_comes_while_the_judge_thinks_wins(store):
    sampler, seen = ScriptedSampler(None, GOOD), MarksSeen()
    await add(store, 0)
    stage = make_stage(store, sampler, seen, vote_seconds=0.2)
    async with judging(stage):
        await sampler.asked.wait()
        await store.mark("s", 0, explicit(-0.5))
        await add(store, 1)
        stage.wake()
        await seen.wait_for(1)
        while stage.waiting:
            await anyio.sleep(0.01)
    turn = await store.turn("s", 0)
    assert turn.mark == explicit(-0.5)
    assert [turn for _, turn, _ in seen.marks] == [1]


class TellsOneHint:
    """Finds the same hint for each turn."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def find(self, turn: TurnRecord) -> FoundHint:
        self.asked.append(turn.turn)
        return FoundHint(Hint(text="End it with =.", prompt_ids=[1], candidates=1, selected_by="longest"))


async def test_a_turn_that_its_user_rated_gets_a_hint_and_keeps_its_value(store):
    finder = TellsOneHint()
    judge = a_judge(ScriptedSampler(GOOD), finder.find, votes=1)
    stage = JudgeStage(store, judge, ServedPools("judge"), at_once=2, queue=4)
    await add(store, 0, 1)
    await store.record(a_turn(2))
    for turn in range(3):
        await store.mark("s", turn, explicit(-0.5))
        stage.note_feedback("s", turn)
    stage.note_feedback("gone", 7)
    async with judging(stage):
        await until(lambda: not stage.waiting and len(finder.asked) >= 2, 10)
    turns = await store.turns("s")
    marks = [turn.mark for turn in turns]
    assert [mark.value for mark in marks if mark is not None] == [-0.5] * 3
    assert [mark.hint is not None for mark in marks if mark is not None] == [True, True, False]
    assert sorted(finder.asked) == [0, 1]


async def test_a_turn_that_its_user_rated_waits_for_the_judge_with_its_hint(store):
    away = BackendUnreachable("gone")
    sampler, pools = ScriptedSampler(away, r"[HINT_START]End it with =, please.[HINT_END] \boxed{1}"), ServedPools()
    sampler.is_served = False
    judge = a_judge(sampler, finder(sampler)[0].find, votes=1)
    stage = JudgeStage(store, judge, pools, at_once=1, queue=4, retry_seconds=0.01)
    await add(store, 0)
    await store.mark("s", 0, explicit(1.0))
    stage.note_feedback("s", 0)
    async with judging(stage):
        await anyio.wait_all_tasks_blocked()
        sampler.is_served = True
        pools.serve("judge")
        await until(lambda: not stage.waiting and sampler.prompts, 10)
    mark = (await store.turn("s", 0)).mark
    assert (mark.value, mark.hint and mark.hint.text) == (1.0, "End it with =, please.")


async def test_a_hint_that_was_found_is_kept_when_feedback_comes_meanwhile(store):
    sampler, seen = ScriptedSampler(None), MarksSeen()
    judge = a_judge(sampler, TellsOneHint().find, votes=1, vote_seconds=0.2)
    stage = JudgeStage(store, judge, ServedPools("judge"), at_once=1, queue=4, on_mark=seen.judged)
    await add(store, 0)
    async with judging(stage):
        await sampler.asked.wait()
        await store.mark("s", 0, explicit(1.0))
        await until(lambda: not stage.waiting, 10)
    turn = await store.turn("s", 0)
    assert (turn.mark.value, turn.mark.reason) == (1.0, MarkReason.EXPLICIT)
    assert turn.mark.hint is not None
    assert seen.marks == []


async def test_a_turn_that_breaks_the_judge_stops_nobody(store, capsys):
    sampler, seen = ScriptedSampler(RuntimeError("it said: my secret"), GOOD), MarksSeen()
    await add(store, 0, 1)
    async with judging(make_stage(store, sampler, seen, at_once=1)):
        marks = await seen.wait_for(2)
    assert [(mark.value, mark.reason) for mark in marks] == [
        (None, MarkReason.ALL_FAILED),
        (1.0, MarkReason.MAJORITY),
    ]
    assert "my secret" not in capsys.readouterr().out


async def test_a_store_that_fails_for_a_while_loses_no_turn():
    class Flaky(SqliteLiveStore):
        failures = 4

        async def to_judge(self, limit: int) -> list[UnjudgedTurn]:
            self._fail()
            return list(await super().to_judge(limit))

        async def mark(self, *args: object) -> bool:  # type: ignore[override]
            self._fail()
            return await super().mark(*args)  # type: ignore[arg-type]

        def _fail(self) -> None:
            self.failures -= 1
            if self.failures % 2:
                raise StoreError("the disk is busy")

    async with Flaky(":memory:") as store:
        seen = MarksSeen()
        await add(store, 0)
        stage = make_stage(store, ScriptedSampler(GOOD), seen)
        async with judging(stage), anyio.create_task_group() as tasks:

            async def keep_waking() -> None:
                while True:
                    stage.wake()
                    await anyio.sleep(0.01)

            tasks.start_soon(keep_waking)
            [mark] = await seen.wait_for(1)
            tasks.cancel_scope.cancel()
    assert mark.value == 1.0


async def test_rules_see_the_earlier_turns_of_the_session(store):
    seen = MarksSeen()
    await add(store, 0, calls=("ls",))
    await add(store, 1, calls=("ls",), kind=TurnKind.SIDE)
    await add(store, 2, 3, calls=("cat",))
    async with judging(make_stage(store, ScriptedSampler(GOOD), seen, overrides=["repeated_call"])):
        await seen.wait_for(3)
    assert {turn: mark.value for _, turn, mark in seen.marks} == {0: 1.0, 2: 1.0, 3: -1.0}

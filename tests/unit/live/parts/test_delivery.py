"""Parts of sessions become batches of runs, each turn once, whatever happens in between."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest

from api_schemas.errors import ErrorInfo
from api_schemas.exports import ExportedSample, RescoreRun
from api_schemas.nodes import NodeState
from api_schemas.rollouts import Rollout, RolloutRequest
from api_schemas.rollouts.sessions import Hint, MaskReason, RolloutKind, Teacher
from api_schemas.runs import Batch, RunState
from api_schemas.tasks import Task
from rollout_service.base.errors import InvalidFieldError
from rollout_service.live.judging.teacher import TeacherReading
from rollout_service.live.parts.deletion import SessionDeletion
from rollout_service.live.parts.delivery import PartDelivery
from rollout_service.live.parts.environment import LOST_SECONDS, PartGoneError, SessionParts
from rollout_service.live.serving import views
from rollout_service.live.sessions import LiveSessions
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.pipeline.attempt import ElsewhereError
from rollout_service.runs.api import RunExporter, RunService
from rollout_service.runs.rescore import Rescorer
from rollout_service.settings.live import LiveSettings
from rollout_service.store.cluster_contract import NodeRecord, NodeReport
from rollout_service.tokens import check_invariants
from tests.support.clocks import ManualClock
from tests.support.live.parts import LiveBench, live_bench
from tests.support.live.store import explicit, judged
from tests.unit.live.test_replay import RENDERER


def rollouts(batch: Batch | None) -> list[Rollout]:
    return [sample.rollout for group in batch.groups for sample in group.samples]


def sessions_in(batch: Batch | None) -> list[list[str]]:
    """Return the sessions of each group of a batch, all of whose samples are usable."""
    assert all(sample.usable for group in batch.groups for sample in group.samples)
    return [
        sorted(one.rollout.session.session_id for one in group.samples if one.rollout.session is not None)
        for group in batch.groups
    ]


async def test_a_session_becomes_a_batch():
    async with live_bench() as bench:
        await bench.create_run(live={"next_state": True})
        stored = await bench.serve("s", [1.0, 0.0, -1.0, -1.0, None])
        await bench.drive()
        (rollout,) = rollouts(await bench.lease())
        assert rollout.kind is RolloutKind.SESSION
        assert rollout.reward == pytest.approx(-1 / 3)
        assert (rollout.session.session_id, rollout.session.part) == ("s", 0)
        reasons = [(mark.turn, mark.usable, mark.masked_because, mark.value) for mark in rollout.turn_marks]
        assert reasons == [
            (0, True, None, 1.0),
            (1, False, MaskReason.ZERO, 0.0),
            (2, True, None, -1.0),
            (3, True, None, -1.0),
            (4, False, MaskReason.NO_NEXT_STATE, None),
        ]
        states = [mark.next_state for mark in rollout.turn_marks]
        assert states[0].text == "said after 0"
        assert states[4] is None
        trajectory, whole = rollout.trajectory, stored.capture.trajectory()
        check_invariants(trajectory)
        chosen = {turn for segment in trajectory.segments for turn in segment.turn_ids} - {-1}
        assert chosen == {0, 2, 3}
        assert rollout.usage.turns == 3
        assert rollout.usage.sampled_tokens == sum(sum(one.loss_mask) for one in trajectory.segments)
        tokens = {
            (turn, token)
            for one in (*whole.segments, *whole.untrained)
            for turn, token in zip(one.turn_ids, one.token_ids, strict=True)
        }
        for one in trajectory.segments:
            pairs = set(zip(one.turn_ids, one.token_ids, strict=True))
            assert {pair for pair in pairs if pair[0] != -1} <= tokens


async def test_the_loops_are_idle_only_without_runs_and_turns():
    async def are_idle(bench: LiveBench) -> tuple[bool, bool]:
        await bench.closer.step()
        await bench.delivery.step()
        return bench.closer.is_idle, bench.delivery.is_idle

    async with live_bench() as bench:
        assert await are_idle(bench) == (True, True)
        await bench.serve("s", [1.0])
        assert await are_idle(bench) == (False, True)
        await bench.create_run()
        assert await are_idle(bench) == (False, False)


async def test_texts_are_hashed_in_threads(monkeypatch):
    class Noting:
        def sha256(self, data: bytes) -> Any:
            threads.append(threading.current_thread())
            return hashlib.sha256(data)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(views, "hashlib", Noting())
    async with live_bench() as bench:
        none = cast(Any, None)
        sessions = LiveSessions(LiveSettings(), bench.live, none, none, none, none, none)
        await bench.create_run()
        await bench.serve("s", [1.0])
        await bench.drive()
        batch = await bench.lease()
        assert rollouts(batch)[0].turn_marks[0].next_state is not None
        assert "said after" not in batch.model_dump_json(), "the run has not asked for texts"
        assert (await sessions.get("s")).turns[0].next_state is not None
    assert len(threads) == 2
    assert threading.current_thread() not in threads


async def test_redelivery_is_the_same_to_the_last_byte():
    async with live_bench() as bench:
        await bench.create_run()
        await bench.serve("s", [1.0, -1.0])
        await bench.drive()
        first = await bench.lease()
        await bench.store.runs.give_back("run", 0)
        await bench.live.mark("s", 0, explicit(-1.0))  # too late for this batch
        again = await bench.lease(key="another")
        assert [one.model_dump_json() for one in again.groups] == [one.model_dump_json() for one in first.groups]


async def test_an_open_session_is_delivered_in_parts():
    async with live_bench() as bench:
        await bench.create_run()
        await bench.serve("s", [1.0, 1.0], ended=False)
        await bench.drive()
        (first,) = rollouts(await bench.lease())
        assert [mark.turn for mark in first.turn_marks] == [0, 1]
        assert first.session.closed_at is None


async def test_sessions_beyond_a_whole_group_wait_for_others():
    async with live_bench() as bench:
        whole = {"max_user_share": 1.0, "max_session_share": 1.0}
        await bench.create_run(group_size=2, filters=[], live=whole)
        for name in "abc":
            await bench.serve(name, [1.0], group="task")
        await bench.drive()
        assert sessions_in(await bench.lease(key="1")) == [["a", "b"]]
        assert await bench.lease(key="2") is None
        await bench.serve("judged by nobody", [None], group="task")
        await bench.drive()
        assert await bench.lease(key="2") is None
        for name in "def":
            await bench.serve(name, [1.0], group="task")
        await bench.drive()
        assert sessions_in(await bench.lease(key="2")) == [["c", "d"]]
        assert sessions_in(await bench.lease(key="3")) == [["e", "f"]]
        run = await bench.store.runs.get("run")
        assert not any(run.count(name) for name in ("ready", "masked", "retried"))


async def test_the_sessions_of_waiting_parts_are_read_once():
    class Counting:
        reads = 0

        def __getattr__(self, name: str) -> object:
            self.reads += name == "session"
            return getattr(bench.live, name)

    async with live_bench() as bench:
        await bench.create_run(group_size=2, filters=[])
        for number in range(5):
            await bench.serve(f"s{number}", [1.0], group=f"task {number}")
        await bench.closer.step()
        store = Counting()
        bench.restart(live=cast(Any, store))
        for _ in range(3):
            await bench.delivery.step()
        assert store.reads == 5


async def test_two_tenants_groups_of_one_name_are_two():
    async with live_bench() as bench:
        await bench.create_run(group_size=2, filters=[], live={"tenants": ["a", "b"]})
        await bench.serve("a1", [1.0], group="task", tenant="a")
        await bench.serve("b1", [1.0], group="task", tenant="b")
        await bench.serve("b2", [1.0], group="task", tenant="b", ended=False)
        await bench.serve("a2", [1.0], group="task", tenant="a")
        await bench.drive()
        assert sessions_in(await bench.lease(key="1")) == [["a1", "a2"]], "another tenant's session is still open"
        await bench.live.close_session("b2", cast(Any, "idle"), bench.now)
        await bench.drive()
        assert sessions_in(await bench.lease(key="2")) == [["b1", "b2"]]


@pytest.mark.slow
async def test_no_batch_mixes_tenants_though_sessions_are_removed_or_on_other_nodes():
    async with live_bench() as bench, SqliteLiveStore(":memory:") as elsewhere:
        await bench.create_run(batch_size=2, live={"tenants": ["a", "b"], "max_user_share": 0.5})
        await bench.serve("a1", [1.0], tenant="a", user="1", retention_seconds=50.0)
        await bench.serve("a2", [1.0], tenant="a", user="2")
        await bench.drive()
        await SessionDeletion(bench.live, bench.store).delete(user="2")
        bench.now += 100.0
        assert await bench.live.prune(bench.now, None) == 1
        await bench.serve("b1", [1.0], tenant="b", user="3")
        await bench.drive()
        assert await bench.lease() is None
        bench.move(elsewhere)
        await bench.serve("b2", [1.0], tenant="b", user="4")
        await bench.serve("a3", [1.0], tenant="a", user="1")
        await bench.drive()
        assert await bench.lease() is None, "one of a user is enough"
        await bench.serve("a4", [1.0], tenant="a", user="5")
        await bench.serve("b3", [1.0], tenant="b", user="5")
        await bench.drive()
        assert sessions_in(await bench.lease(key="1")) == [["a1"], ["a4"]]
        assert sessions_in(await bench.lease(key="2")) == [["b2"], ["b3"]]


async def test_a_user_is_deleted_from_runs_after_the_sessions_were_removed():
    async with live_bench() as bench:
        await bench.create_run(live={"max_user_share": 1.0})
        for name in ("leased", "waiting"):
            await bench.serve(name, [1.0], user="u", retention_seconds=50.0)
            await bench.drive()
            if name == "leased":
                await bench.lease()
        bench.now += 100.0
        assert await bench.live.prune(bench.now, None) == 2
        deleted = await SessionDeletion(bench.live, bench.store).delete(user="u")
        assert (deleted.sessions, deleted.undelivered) == (0, 1)
        assert [(part.session_id, part.part, part.batch_id) for part in deleted.leased] == [("leased", 0, "run.b0")]
        assert await bench.lease(key="another") is None


async def test_a_deletion_that_was_cut_off_is_repeated_by_the_name_of_its_session():
    class CutOff:
        def __getattr__(self, name: str) -> object:
            return getattr(bench.live, name)

        async def delete(self, **which: Any) -> None:
            await bench.work()  # a rollout begins between the erasure and the removal
            await bench.live.delete(**which)
            raise Killed

    async with live_bench() as bench:
        await bench.create_run()
        await bench.serve("s", [1.0])
        await bench.closer.step()
        await bench.delivery.step()
        await bench.manager.step()
        with pytest.raises(Killed):
            await SessionDeletion(cast(Any, CutOff()), bench.store).delete(session_id="s")
        assert await bench.live.session("s") is None, "nobody can name it again"
        assert (await bench.store.get("run.0.0")).error.code == "session_part_gone"
        await bench.drive()
        assert await bench.lease() is None


async def test_the_oldest_run_takes_a_session_of_its_tenant_and_pool():
    async with live_bench() as bench:
        await bench.create_run("first")
        await bench.create_run("second")
        await bench.serve("theirs", [1.0], tenant="other")
        await bench.serve("elsewhere", [1.0], pool="other")
        await bench.serve("s", [1.0])
        await bench.drive()
        assert [(part.session_id, part.run_id) for part in await bench.live.parts()] == [("s", "first")]
        assert (await bench.live.counts())["waiting"] == 2


async def test_parts_that_an_ended_run_did_not_get_go_to_the_next():
    async with live_bench() as bench:
        await bench.create_run("first", batch_size=2)
        await bench.serve("s", [1.0])
        await bench.drive()
        bench.now += 100.0
        await bench.drive()
        assert "wait" in bench.delivery.warnings()[0]
        await bench.store.runs.update("first", state=RunState.ENDED)
        await bench.create_run("second")
        await bench.drive()
        assert bench.delivery.warnings() == []
        assert rollouts(await bench.lease("second"))[0].session is not None


@pytest.mark.parametrize("is_killed", [False, True])
async def test_parts_go_to_the_next_run_though_theirs_ended_while_they_were_appended(is_killed):
    class Ending:
        def __getattr__(self, name: str) -> object:
            return getattr(bench.store.runs, name)

        async def append(self, *args: Any, **values: Any) -> object:
            await bench.store.runs.update("first", state=RunState.ENDED)
            if is_killed:
                raise Killed
            return await bench.store.runs.append(*args, **values)

    async with live_bench() as bench:
        await bench.create_run("first")
        await bench.serve("s", [1.0])
        bench.restart(runs=cast(Any, Ending()))
        await bench.closer.step()
        with pytest.raises(Killed) if is_killed else nullcontext():
            await bench.delivery.step()
            await bench.delivery.step()
        bench.restart()
        await bench.create_run("second")
        await bench.drive()
        assert sessions_in(await bench.lease("second")) == [["s"]]


async def test_turns_that_no_run_takes_are_dropped_in_the_end():
    async with live_bench() as bench:
        await bench.serve("s", [1.0], retention_seconds=50.0)
        await bench.drive()
        bench.now += 100.0
        await bench.drive()
        assert (await bench.live.counts())["dropped:no_run"] == 1


async def test_a_part_is_refused_to_rollouts_that_are_not_its_own():
    async with live_bench() as bench:
        await bench.create_run()
        await bench.serve("s", [1.0])
        await bench.closer.step()
        await bench.delivery.step()
        task = Task(environment="session", instance={"parts": [["s", 0]]})
        for name in ("mine", "other.0.0", "run.1.0"):
            await bench.store.submit(RolloutRequest(rollout_id=name, task=task))
            await bench.work()
            found = await bench.store.get(name)
            assert isinstance(found.error, ErrorInfo)
            assert found.error.code == "session_part_gone"
        assert [part.rollout_id for part in await bench.live.parts()] == [None]
        with pytest.raises(InvalidFieldError, match="the service alone"):
            bench.environment.check(task.instance)
        await bench.drive()
        assert rollouts(await bench.lease())[0].reward == 1.0


class Killed(BaseException):
    """The end of the process."""


class Failing:
    """A store that lets so many calls through and kills the process at the next, before or after its effect."""

    def __init__(self, inner: object, left: list[int], *, after: bool) -> None:
        self._inner, self._left, self._after = inner, left, after

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
        method = getattr(self._inner, name)

        async def call(*args: object, **values: object) -> object:
            self._left[0] -= 1
            if self._left[0] < 0 and not self._after:
                raise Killed
            result = await method(*args, **values)
            if self._left[0] < 0:
                raise Killed
            return result

        return call


async def drive_until_killed(bench: LiveBench, calls: int, *, after: bool) -> bool:
    left = [calls]
    bench.restart(
        cast(Any, Failing(bench.live, left, after=after)),
        cast(Any, Failing(bench.store.runs, left, after=after)),
    )
    try:
        await bench.closer.step()
        await bench.delivery.step()
    except Killed:
        return True
    finally:
        bench.restart()
    return False


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
async def test_every_turn_is_delivered_once_though_the_service_is_killed_at_any_moment(after):
    calls, killed = 0, True
    while killed:
        async with live_bench() as bench:
            await bench.create_run(batch_size=2, live={"max_user_share": 1.0, "max_session_share": 1.0})
            for name in "abcd":
                await bench.serve(name, [1.0, -1.0])
            killed = await drive_until_killed(bench, calls, after=after)
            await drive_until_killed(bench, calls // 2, after=not after)
            await bench.drive()
            batches = [await bench.lease(key=str(number)) for number in range(2)]
            made = [one for batch in batches for one in rollouts(batch)]
            turns = Counter(
                (one.session.session_id, mark.turn) for one in made if one.session for mark in one.turn_marks
            )
            assert turns == dict.fromkeys([(name, turn) for name in "abcd" for turn in range(2)], 1), calls
            assert all(one.reward == 0.0 for one in made)
            assert (await bench.store.runs.get("run")).tasks == 4
        calls += 1
    assert calls > 10


async def test_an_export_has_the_marks_in_the_second_format():
    async with live_bench() as bench:
        await bench.create_run()
        await bench.serve("s", [1.0, None])
        await bench.drive()
        none = cast(Any, None)
        service = RunService(bench.store.runs, lambda _: bench.manager, check_environment=none, check_pool=none)
        pieces = await RunExporter(bench.store.runs, service).start("run", compressed=False)
        lines = [json.loads(line) for line in b"".join([piece async for piece in pieces]).splitlines()]
        assert [line["kind"] for line in lines] == ["run", "sample", "end"]
        assert lines[0]["format"] == 2
        rollout = ExportedSample.model_validate(lines[1]).sample.rollout
        assert [mark.usable for mark in rollout.turn_marks] == [True, False]
        assert rollout.session is not None


async def test_a_part_is_scored_again_by_its_recorded_values():
    async with live_bench() as bench:
        await bench.create_run()
        await bench.serve("s", [1.0, -1.0, 1.0])
        await bench.drive()
        rescorer = Rescorer(bench.context, cast(Any, None))
        (again,) = [one async for one in await rescorer.rescore_run("run", RescoreRun())]
        assert (again.error, again.reward, again.recorded_reward) == (None, pytest.approx(1 / 3), again.reward)
        (refused,) = [one async for one in await rescorer.rescore_run("run", RescoreRun(replay="always"))]
        assert refused.error.code == "not_replayable"


class OneTeacher:
    """A teacher that reads every answer but the last."""

    async def read(self, pool: str, prompt_ids: list[int], sampled_ids: list[int]) -> TeacherReading:
        if prompt_ids == [9]:
            return TeacherReading(None, "timeout")
        return TeacherReading(Teacher(model=f"{pool}@1", logprobs=[-0.25] * len(sampled_ids)))


async def test_a_teacher_is_asked_only_for_runs_that_want_it():
    async with live_bench() as bench:
        parts = SessionParts(bench.live, bench.store.runs, lambda _: RENDERER, cast(Any, OneTeacher()))
        bench.environment.recorded = parts
        for number, wanted in enumerate((True, False)):
            run_id = f"run{number}"
            await bench.create_run(run_id, live={"teacher": wanted})
            await bench.serve(f"s{number}", [None, None], ended=False)
            for turn in range(2):
                hint = Hint(text="use =", prompt_ids=[turn * 9], candidates=1, selected_by="longest")
                await bench.live.mark(f"s{number}", turn, judged(1.0, hint=hint))
            await bench.live.close_session(f"s{number}", cast(Any, "idle"), bench.now)
            await bench.drive()
            (rollout,) = rollouts(await bench.lease(run_id))
            lengths = [len(mark.teacher.logprobs) if mark.teacher else None for mark in rollout.turn_marks]
            first = sum(segment.turn_ids.count(0) for segment in rollout.trajectory.segments)
            assert lengths == ([first, None] if wanted else [None, None])
            assert all(mark.hint is not None for mark in rollout.turn_marks)
            await bench.store.runs.update(run_id, state=RunState.ENDED)


class Nodes:
    """The node `here`, in some state or gone."""

    state: NodeState | None = None

    async def nodes(self) -> list[NodeRecord]:
        return [] if self.state is None else [NodeRecord(NodeReport("here", "owner"), self.state, 0.0)]


@pytest.mark.slow
async def test_a_part_waits_for_the_node_that_has_its_session():
    async with live_bench() as bench:
        await bench.create_run()
        await bench.serve("s", [1.0])
        await bench.closer.step()
        await PartDelivery(bench.live, bench.store.runs, node="here").step()
        await bench.manager.step()
        (lease,) = await bench.store.claim("here", limit=1, lease_seconds=60)
        for node in ("there", None):
            parts = SessionParts(bench.live, bench.store.runs, lambda _: RENDERER, node=node)
            with pytest.raises(ElsewhereError):
                await parts.open(lease.request)
        assert [part.rollout_id for part in await bench.live.parts()] == [None]
        cluster, clock = Nodes(), ManualClock(0.0)
        parts = SessionParts(bench.live, bench.store.runs, lambda _: RENDERER, None, "there", cast(Any, cluster), clock)
        for seconds, state, error in (
            (0, NodeState.READY, ElsewhereError),
            (0, NodeState.DEAD, ElsewhereError),
            (LOST_SECONDS - 1, None, ElsewhereError),
            (1, None, PartGoneError),
            (0, NodeState.DRAINING, ElsewhereError),
            (LOST_SECONDS, NodeState.DEAD, ElsewhereError),
        ):
            clock.now += seconds
            cluster.state = state
            with pytest.raises(error):
                await parts.open(lease.request)
        here = SessionParts(bench.live, bench.store.runs, lambda _: RENDERER, node="here")
        assert (await here.open(lease.request)).info.session_id == "s"

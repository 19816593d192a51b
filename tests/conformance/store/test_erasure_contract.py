"""Every store erases what a person demands, in whatever state its group is, and delivers nothing of it later."""

import errno
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest

from api_schemas.rollouts import Rollout, RolloutRequest, TokenExtras
from api_schemas.rollouts.sessions import NextState, RolloutKind, SessionInfo, TurnMark
from api_schemas.runs import Group, InlineTasks, RunState
from api_schemas.runs.live import LiveDelivery
from api_schemas.trajectories import Message
from api_schemas.views.summaries import SummaryFilter
from rollout_service.base.errors import StoreError
from rollout_service.cluster.identity import is_gone
from rollout_service.groups.filters import STALE, FilterChain
from rollout_service.runs.open_groups import close_group
from rollout_service.store import Store
from rollout_service.store.contract import EncodedSteps
from rollout_service.store.redis.store import RedisStore
from rollout_service.store.runs_contract import GroupClosure, NewGroup
from rollout_service.store.segments import SegmentFiles
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.sqlite import SqliteStore
from tests.support import samples
from tests.support.redis_server import RedisServer
from tests.support.runs import TASKS, create_run, lease_batch, leased_batch, trajectory
from tests.support.searching import holding, redis_values, sqlite_values, traces
from tests.support.store.servers import PLACES, files_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Bench:
    """A store, and a way to look at all that it keeps."""

    store: Store
    values: Callable[[], list[bytes]]
    file: Path | None = None

    async def start(self, *numbers: int) -> None:
        """Start groups of two."""
        extras = TokenExtras(turn_marks=True)
        groups = [
            NewGroup(
                number,
                0,
                [RolloutRequest(rollout_id=f"a.{number}.{s}", task=TASKS[0], exports=extras) for s in range(2)],
            )
            for number in numbers
        ]
        assert await self.store.runs.start_groups("a", groups) == len(numbers)

    async def end(self) -> None:
        """Complete the rollouts that are queued, each with words of its own."""
        for lease in await self.store.claim("w", limit=100, lease_seconds=1e6):
            await self.store.save_steps([EncodedSteps(lease.rollout_id, words(lease.rollout_id, "steps"))])
            assert await self.store.finish(lease, "w", result(lease.rollout_id))

    async def close(self, number: int, **fields: int) -> GroupClosure:
        """Close a group as the manager of runs does."""
        closure = await self.decide(number, **fields)
        await self.store.runs.close_group("a", closure)
        return closure

    async def decide(self, number: int) -> GroupClosure:
        """Return the closure of an open group."""
        run = await self.store.runs.get("a")
        (group,) = [one for one in await self.store.runs.open_groups("a") if one.number == number]
        samples = []
        for member in group.members:
            rollout = await self.store.get(member.rollout_id, whole_tree=True)
            assert rollout is not None
            samples.append((member, rollout))
        chain = FilterChain((), run.request.min_usable)
        return close_group(run.request, chain, number, samples, weights=None)

    async def ready(self, *numbers: int) -> None:
        """Start, end and close groups."""
        await self.start(*numbers)
        await self.end()
        for number in numbers:
            await self.close(number)

    def keeps(self, rollout_id: str) -> bool:
        """Return whether anything that a rollout said is kept."""
        return bool(holding(self.values(), f"words of {rollout_id};".encode()))


def words(rollout_id: str, kind: str) -> bytes:
    noise = sha256(f"{rollout_id} {kind}".encode()).hexdigest()
    return f"{kind}: words of {rollout_id}; {noise}".encode()


def result(rollout_id: str) -> Rollout:
    text = words(rollout_id, "said").decode()
    group = rollout_id.split(".")[1]
    tenant = "t" if int(group) < 2 else "u"
    session = SessionInfo(session_id=f"s {text}", user=f"u {text}", tenant=tenant, opened_at=NOW, part=0)
    state = NextState(role="user", chars=1, sha256="0", text=text)
    told = trajectory(1).model_copy(update={"messages": [Message(role="user", content=text)]})
    return samples.rollout(
        rollout_id,
        task=TASKS[0],
        reward=float(rollout_id.endswith("1")),
        reward_parts={"part": 1.0},
        notes=[text],
        created_at=NOW,
        trajectory=told,
        kind=RolloutKind.SESSION,
        session=session,
        turn_marks=[TurnMark(turn=0, usable=True, value=1.0, next_state=state)],
    )


@pytest.fixture(params=["sqlite", *PLACES])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    if request.param == "sqlite":
        path = tmp_path / "store.sqlite3"
        async with await SqliteStore.open(path) as store:
            yield Bench(store, lambda: sqlite_values(path), path)
        return
    server: RedisServer = request.getfixturevalue("shared_redis")
    config = server.config()
    files = files_of(request.param, request)
    async with await RedisStore.open(config, is_gone=is_gone, files=files) as redis:
        yield Bench(redis, lambda: [*redis_values(server, config), *read(files)])


def read(files: SegmentFiles | None) -> list[bytes]:
    return [] if files is None else [files.read(name, 0, size) for name, size in files.sizes().items()]


async def in_an_open_group(bench: Bench) -> None:
    await bench.start(0)
    await bench.end()


async def in_a_group_that_waits(bench: Bench) -> None:
    await bench.ready(0)


async def in_a_batch(bench: Bench) -> None:
    await bench.ready(0)
    await leased_batch(bench.store)


async def in_a_batch_that_is_acknowledged(bench: Bench) -> None:
    await in_a_batch(bench)
    await bench.store.runs.acknowledge("a", 0)


STATES = [in_an_open_group, in_a_group_that_waits, in_a_batch, in_a_batch_that_is_acknowledged]


@pytest.mark.parametrize("reach", STATES)
async def test_nothing_of_an_erased_sample_is_kept(bench, reach):
    await create_run(bench.store, batch_size=1)
    await bench.store.runs.overwrite_deleted()
    await reach(bench)  # type: ignore[misc]
    assert bench.keeps("a.0.0")
    shown = traces(bench.values(), b"words of a.0.0;")
    batches = await bench.store.runs.erase(["a.0.0"])
    assert batches == ({"a.0.0": "a.b0"} if reach in STATES[2:] else {})
    assert not bench.keeps("a.0.0")
    assert bench.keeps("a.0.1"), "the other sample is somebody else's"
    if bench.file is not None:
        assert shown
        kept = bench.values()
        gone = [trace for trace in shown if not any(trace in value for value in kept)]
        assert gone
        assert [trace for trace in gone if any(trace in data for data in read(SharedFiles(bench.file.parent)))] == []
    assert await bench.store.save_steps([EncodedSteps("a.0.0", b"later")]) == 0
    assert await bench.store.runs.erase(["a.0.0", "a.9.0", "gone.0.0"]) == batches


@pytest.mark.parametrize("bench", ["sqlite"], indirect=True)
async def test_a_file_of_an_earlier_release_lets_rewards_be_erased(bench):
    await create_run(bench.store, batch_size=1)
    await in_a_batch(bench)
    with closing(sqlite3.connect(bench.file)) as db:
        db.executescript("""
            DROP TRIGGER ended_is_final;
            CREATE TRIGGER terminal_is_final BEFORE UPDATE ON rollouts BEGIN SELECT RAISE(ABORT, 'it ended'); END;
        """)
    await bench.store.close()
    async with await SqliteStore.open(bench.file) as store:
        await store.runs.erase(["a.0.1"])


async def test_the_reward_of_an_erased_sample_is_neither_listed_nor_found(bench):
    await create_run(bench.store, batch_size=1)
    await in_a_batch(bench)
    await bench.store.runs.erase(["a.0.1"])
    await bench.store.runs.erase(["a.0.1"])
    listed = (await bench.store.summaries(SummaryFilter(), limit=9)).rows
    assert {row.rollout_id: row.reward for row in listed} == {"a.0.0": 0.0, "a.0.1": None}
    found = await bench.store.summaries(SummaryFilter(reward_min=0.5), limit=9)
    assert found.rows == []


@pytest.mark.parametrize("bench", PLACES[1:], indirect=True)
async def test_an_erasure_that_failed_is_completed_when_it_is_repeated(bench, monkeypatch):
    await create_run(bench.store, batch_size=1)
    await in_a_batch(bench)

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(type(bench.store.segments._files), "overwrite", fail)
        with pytest.raises(StoreError):
            await bench.store.runs.erase(["a.0.0"])
    assert await bench.store.runs.erase(["a.0.0"]) == {"a.0.0": "a.b0"}
    assert not bench.keeps("a.0.0")


async def test_an_erased_sample_of_an_open_group_is_masked_when_it_closes(bench):
    await create_run(bench.store, batch_size=1)
    await in_an_open_group(bench)
    await bench.store.runs.erase(["a.0.0"])
    (group,) = await bench.store.runs.open_groups("a")
    assert [member.is_erased for member in group.members] == [True, False]
    await bench.close(0)
    assert await delivered(bench) == [("deleted", None, False), (None, 1.0, True)]
    assert (await bench.store.runs.get("a")).count("masked") == 1


async def test_a_closure_that_uses_what_was_erased_meanwhile_is_not_taken(bench):
    await create_run(bench.store, batch_size=1)
    await in_an_open_group(bench)
    decided = await bench.decide(0)
    await bench.store.runs.erase(["a.0.0"])
    await bench.store.runs.close_group("a", decided)
    assert dict(await bench.store.runs.group_states("a")) == {0: "open"}
    await bench.close(0)
    await bench.store.runs.reclose_group("a", decided)
    assert await delivered(bench) == [("deleted", None, False), (None, 1.0, True)]


async def test_what_was_erased_takes_no_room(bench):
    await create_run(bench.store, batch_size=1)
    await in_an_open_group(bench)
    await bench.store.runs.erase(["a.0.0", "a.0.1"])
    await bench.close(0)
    assert await bench.store.runs.prune("a", seconds=None, max_bytes=0) == 0


@pytest.mark.parametrize("reason", [None, "zero_variance"])
async def test_a_closure_that_masks_what_was_erased_meanwhile_brings_nothing_of_it_back(bench, reason):
    await create_run(bench.store, batch_size=1)
    await in_an_open_group(bench)
    decided = await bench.decide(0)
    first, second = decided.samples
    stale = replace(first, usable=False, masked_because=STALE, reward=None)
    decided = replace(decided, reason=reason, samples=[stale, second])
    await bench.store.runs.erase(["a.0.0"])
    await bench.store.runs.close_group("a", decided)
    assert not bench.keeps("a.0.0")
    await bench.close(0)
    await bench.store.runs.reclose_group("a", decided)
    assert not bench.keeps("a.0.0")
    assert await delivered(bench) == [("deleted", None, False), (None, 1.0, True)]


@pytest.mark.parametrize("min_usable", [1, 2])
async def test_a_group_that_waits_is_kept_while_it_has_enough(bench, min_usable):
    await create_run(bench.store, batch_size=1, min_usable=min_usable)
    await bench.ready(0)
    await bench.store.runs.group_heads("a", [0])
    await bench.store.runs.erase(["a.0.0"])
    run = await bench.store.runs.get("a")
    assert (run.count("ready"), run.count("dropped:deleted")) == ((1, 0) if min_usable == 1 else (0, 1))
    if min_usable == 1:
        assert await delivered(bench) == [("deleted", None, False), (None, 1.0, True)]
        await bench.store.runs.acknowledge("a", 0)
    else:
        assert not hasattr(await lease_batch(bench.store), "groups")
    assert await bench.store.runs.erase(["a.0.1"]) == ({"a.0.1": "a.b0"} if min_usable == 1 else {})


async def test_a_batch_keeps_its_groups_with_the_sample_masked(bench):
    await create_run(bench.store, batch_size=2)
    await bench.ready(0, 1)
    batch = await leased_batch(bench.store)
    await bench.store.runs.erase(["a.0.0", "a.0.1"])
    await bench.store.runs.give_back("a", 0)
    again = await leased_batch(bench.store, "another")
    assert again.groups == batch.groups == [0, 1]
    assert await samples_of(bench, 0) == [("deleted", None, False)] * 2
    assert await samples_of(bench, 1) == [(None, 0.0, True), (None, 1.0, True)]


async def test_those_that_replaced_a_rollout_are_erased_with_it(bench):
    await create_run(bench.store, batch_size=1)
    await in_an_open_group(bench)
    again = RolloutRequest(rollout_id="a.0.0.1", task=TASKS[0], exports=TokenExtras(turn_marks=True))
    await bench.store.runs.retry_sample("a", 0, 0, again)
    await bench.end()
    assert bench.keeps("a.0.0.1")
    await bench.store.runs.erase(["a.0.0"])
    assert not bench.keeps("a.0.0.1")
    await bench.close(0)
    assert await delivered(bench) == [("deleted", None, False), (None, 1.0, True)]


async def test_a_callers_rollout_with_a_name_as_that_of_a_sample_is_not_erased(bench):
    await create_run(bench.store, batch_size=1)
    await in_an_open_group(bench)
    await bench.store.submit(RolloutRequest(rollout_id="a.0.0.1", task=TASKS[0]))
    await bench.end()
    await bench.store.runs.erase(["a.0.0"])
    assert not bench.keeps("a.0.0")
    assert bench.keeps("a.0.0.1")


async def delivered(bench: Bench) -> list[tuple[str | None, float | None, bool]]:
    batch = await leased_batch(bench.store)
    assert batch.groups == [0]
    return await samples_of(bench, 0)


async def samples_of(bench: Bench, number: int) -> list[tuple[str | None, float | None, bool]]:
    """Return why each sample of a group is masked, its reward, and whether it has tokens, the same by both ways."""
    group = await bench.store.runs.group("a", number)
    (head,) = await bench.store.runs.group_heads("a", [number])
    assert [bool(tokens) for tokens in head.tokens] == [bool(one.rollout.trajectory) for one in group.samples]
    told = Group.model_validate_json(head.json)
    assert [one.rollout.session for one in told.samples] == [one.rollout.session for one in group.samples]
    assert all((one.rollout.session is None) == (not one.usable) for one in group.samples)
    return [(one.masked_because, one.reward, one.rollout.trajectory is not None) for one in group.samples]


LIVE = LiveDelivery(max_user_share=1.0, max_session_share=1.0)


def user_of(rollout_id: str) -> str:
    return f"u {words(rollout_id, 'said').decode()}"


async def test_a_batch_is_made_of_one_tenants_groups_whatever_is_erased(bench):
    await create_run(bench.store, batch_size=2, source=InlineTasks(open=True), live=LIVE)
    await bench.ready(0, 1, 2, 3)
    ready = await bench.store.runs.ready_groups("a")
    assert [{owner.tenant for owner in one.owners} for one in ready] == [{"t"}, {"t"}, {"u"}, {"u"}]
    await bench.store.runs.erase(["a.1.0", "a.1.1"])
    assert [one.number for one in await bench.store.runs.ready_groups("a")] == [0, 2, 3]
    batch = await leased_batch(bench.store)
    assert batch.groups == [2, 3]
    await bench.store.runs.update("a", state=RunState.ENDED)
    assert (await leased_batch(bench.store, "last")).groups == [0]


async def test_the_rollouts_of_a_user_are_found_in_open_and_closed_groups(bench):
    await create_run(bench.store, batch_size=1, source=InlineTasks(open=True), live=LIVE)
    await bench.ready(0)
    await leased_batch(bench.store)
    await bench.start(1)
    again = RolloutRequest(rollout_id="a.1.0.1", task=TASKS[0], exports=TokenExtras(turn_marks=True))
    await bench.store.runs.retry_sample("a", 1, 0, again)
    await bench.end()
    for rollout_id, first in (("a.0.1", "a.0.1"), ("a.1.1", "a.1.1"), ("a.1.0.1", "a.1.0")):
        assert await bench.store.runs.rollouts_of(user_of(rollout_id)) == [first]
        await bench.store.runs.erase([first])
        assert await bench.store.runs.rollouts_of(user_of(rollout_id)) == []
    assert await bench.store.runs.rollouts_of("nobody") == []

"""A store over several Redis refuses other settings, survives outages of a part, and merges what the parts have."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.nodes import NodeState
from api_schemas.rollouts import RolloutState
from api_schemas.views.summaries import SummaryFilter
from rollout_service.base.errors import InvalidFieldError, StoreError
from rollout_service.cluster.identity import is_gone
from rollout_service.store.cluster_contract import NodeReport
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.segments.files import SharedFiles
from rollout_service.store.sharded import ShardedStore
from rollout_service.store.sharded.store import shard_of
from tests.support.redis_server import RedisServer, redis_server
from tests.support.store.rollouts import TRAJECTORY, completed, order, persistently
from tests.support.store.sharded import names_of_shard, opened_shards, shard_configs

pytestmark = pytest.mark.redis
PATIENCE_SECONDS = 30.0


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True), st.integers(1, 16), st.integers(0))
def test_the_rollouts_of_a_run_are_in_its_shard(run, shards, number):
    assert shard_of(f"{run}.{number}.0", shards) == shard_of(f"{run}.{number}.3.1", shards) == shard_of(run, shards)
    assert 0 <= shard_of(run, shards) < shards


def test_runs_are_spread_evenly():
    found = [shard_of(f"run-{number}", 4) for number in range(4_000)]
    assert all(900 < found.count(shard) < 1_100 for shard in range(4))


async def until_away(store: ShardedStore, shard: int, *, away: bool) -> None:
    """Wait until a shard is away, or can be written again."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while (shard in store.failing) is not away:
            with suppress(StoreError):
                await store.shards[shard].cluster.leave("nobody")
            await anyio.sleep(0.05)


@pytest.fixture
def servers() -> Iterator[list[RedisServer]]:
    """Run two Redis of this test alone."""
    with redis_server() as one, redis_server() as other:
        yield [one, other]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda configs: [*configs, replace(configs[1], url=configs[0].url)], "has shard 0 of 2"),
        (lambda configs: configs[:1], None),
    ],
    ids=["one more", "single"],
)
async def test_other_settings_are_refused(shared_shards, change, why):
    configs = shard_configs(*shared_shards)
    async with opened_shards(configs) as store:
        await store.submit(order("r1"))
    changed = [replace(one, shard=number) for number, one in enumerate(change(configs))]
    changed = [replace(one, shards=len(changed)) for one in changed]
    if why is None:  # the keys of a store of one shard have another name: it is another store
        async with await RedisStore.open(changed[0], is_gone=is_gone) as other:
            assert await other.get("r1") is None
        return
    with pytest.raises(StoreError, match=why):
        async with opened_shards(changed):
            pass


async def test_a_part_of_another_store_is_refused(shared_shards):
    configs, others = shard_configs(*shared_shards), shard_configs(*shared_shards)
    async with opened_shards(configs), opened_shards(others):
        pass
    foreign = replace(others[1], prefix=others[0].prefix)
    mixed = [configs[0], replace(foreign, shard=1)]
    with pytest.raises(StoreError, match="shard 1 of another store"):
        async with opened_shards(mixed):
            pass


async def test_a_shard_that_is_away_takes_only_its_own_with_it(servers):
    configs = shard_configs(*servers)
    async with opened_shards(configs) as store:
        here, there = names_of_shard(0, 4), names_of_shard(1, 4)
        for name in (*here, *there):
            await store.submit(order(name))
        (mine,) = await store.claim("a", limit=1, lease_seconds=1_000)
        servers[1].kill()
        await until_away(store, 1, away=True)
        assert store.problem is None
        leases = await store.claim("a", limit=20, lease_seconds=1_000)
        assert {lease.rollout_id for lease in (*leases, mine)} >= set(here)
        for lease in leases:
            assert await store.finish(lease, "a", completed(lease))
        with pytest.raises(StoreError):
            await store.get(there[0])
        with pytest.raises(StoreError):
            await store.submit(order(names_of_shard(1, 9)[-1]))
        assert sum((await store.counts()).values()) == len(here), "what is counted is what answers"
        servers[1].start()
        await until_away(store, 1, away=False)
        left = await store.claim("a", limit=20, lease_seconds=1_000)
        assert {lease.rollout_id for lease in (*leases, *left, mine)} == {*here, *there}


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_store_opens_while_a_shard_is_away(servers, tmp_path, is_new):
    configs, names_there = shard_configs(*servers), names_of_shard(1, 2)
    files = [SharedFiles(tmp_path / f"shard-{number}") for number in range(2)]
    if not is_new:
        async with opened_shards(configs, files=files) as store:
            await store.submit(order(names_there[0]))
    servers[1].kill()
    async with opened_shards(configs, files=files) as store:
        await until_away(store, 1, away=True)
        await store.submit(order(names_of_shard(0, 1)[0]))
        with pytest.raises(StoreError):
            await store.get(names_there[0])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.shards[1].segments.watch.run)
            servers[1].start()
            await until_away(store, 1, away=False)
            await store.submit(order(names_there[1]))
            leases = await store.claim("a", limit=9, lease_seconds=1_000)
            expected = {names_of_shard(0, 1)[0], *names_there[is_new:]}
            assert {lease.rollout_id for lease in leases} == expected
            for lease in leases:
                assert await persistently(lambda lease=lease: store.finish(lease, "a", completed(lease, TRAJECTORY)))
            with anyio.fail_after(PATIENCE_SECONDS):
                assert (await store.wait_for_result(names_there[1])).state is RolloutState.COMPLETED
            tasks.cancel_scope.cancel()
        assert await store.trajectory(names_there[1]) is not None


async def test_a_shard_that_refuses_is_not_taken_for_one_that_is_away(servers):
    configs = shard_configs(*servers)
    servers[1].do("CONFIG", "SET", "requirepass", "secret")
    servers[1].password = "secret"
    with pytest.raises(StoreError, match="Authentication required"):
        async with opened_shards(configs):
            pass


async def test_a_store_does_not_open_without_its_home(servers):
    configs = shard_configs(*servers)
    async with opened_shards(configs):
        pass
    servers[0].kill()
    with pytest.raises(StoreError):
        async with opened_shards(configs):
            pass


async def test_pages_go_on_with_a_shard_once_it_is_back(servers):
    async with opened_shards(shard_configs(*servers)) as store:
        every = [name for pair in zip(names_of_shard(0, 6), names_of_shard(1, 6), strict=True) for name in pair]
        for name in every:
            await store.submit(order(name))
        page = await store.list(limit=4)
        assert [one.rollout_id for one in page.rollouts] == every[:4]
        servers[1].kill()
        await until_away(store, 1, away=True)
        found = [one.rollout_id for one in page.rollouts]
        while not set(names_of_shard(0, 6)) <= set(found):
            page = await store.list(cursor=page.next_cursor, limit=4)
            found += [one.rollout_id for one in page.rollouts]
        with pytest.raises(StoreError):
            await store.list(cursor=page.next_cursor, limit=4)
        servers[1].start()
        await until_away(store, 1, away=False)
        while page.next_cursor is not None:
            page = await store.list(cursor=page.next_cursor, limit=4)
            found += [one.rollout_id for one in page.rollouts]
        assert sorted(found) == sorted(every), "each once"


@pytest.mark.parametrize("cursor", ["1", "x.x", "1.2.3", "", "b", "1.-2"])
async def test_cursors_of_other_stores_are_refused(shared_shards, cursor):
    async with opened_shards(shard_configs(*shared_shards)) as store:
        with pytest.raises(InvalidFieldError):
            await store.list(cursor=cursor)
        with pytest.raises(InvalidFieldError):
            await store.summaries(SummaryFilter(), cursor=cursor)


async def test_a_shard_that_hangs_keeps_no_heartbeat_waiting(servers):
    report = NodeReport("n1", "a", environments=["calc"])
    async with opened_shards(shard_configs(*servers)) as store:
        await store.cluster.join(report)
        with servers[1].paused():
            for _ in range(4):
                with anyio.fail_after(5):
                    assert (await store.cluster.heartbeat(report)).is_member
                await anyio.sleep(0.5)
            assert 1 in store.failing
        await until_away(store, 1, away=False)
        assert (await store.cluster.heartbeat(report)).is_member


async def test_a_node_that_one_shard_lost_joins_it_again(shared_shards):
    report = NodeReport("n1", "a", environments=["calc"])
    async with opened_shards(shard_configs(*shared_shards)) as store:
        await store.cluster.join(report)
        await store.shards[1].cluster.leave("a")
        rewinds = store.rewinds
        assert (await store.cluster.heartbeat(report)).is_member
        assert store.rewinds > rewinds, "its leases there may be others than it knows"
        assert [node.report.owner for node in await store.shards[1].cluster.nodes()] == ["a"]
        for shard in store.shards:
            await shard.cluster.leave("a")
        assert not (await store.cluster.heartbeat(report)).is_member, "it drops its work before it joins"


async def test_a_drain_reaches_a_shard_that_was_away(servers):
    report = NodeReport("n1", "a", environments=["calc"])
    async with opened_shards(shard_configs(*servers)) as store:
        await store.cluster.join(report)
        servers[1].kill()
        await until_away(store, 1, away=True)
        await store.cluster.change_state("n1", NodeState.DRAINING)
        servers[1].start()
        await until_away(store, 1, away=False)
        assert (await store.cluster.heartbeat(report)).state is NodeState.DRAINING
        (node,) = await store.shards[1].cluster.nodes()
        assert node.state is NodeState.DRAINING


async def test_a_claim_whose_answer_comes_too_late_is_noticed(servers):
    async with opened_shards(shard_configs(*servers)) as store:
        (name,) = names_of_shard(1, 1)
        await store.submit(order(name))
        rewinds = store.rewinds
        with servers[1].paused():
            assert await store.claim("a", limit=1, lease_seconds=1_000) == []
        with anyio.fail_after(PATIENCE_SECONDS):
            while store.rewinds == rewinds:
                await anyio.sleep(0.05)
        held = await store.held("a")
        assert list(held) in ([name], [])


async def test_work_is_claimed_from_all_shards_in_turns(shared_shards):
    async with opened_shards(shard_configs(*shared_shards)) as store:
        for name in (*names_of_shard(0, 20), *names_of_shard(1, 20)):
            await store.submit(order(name))
        claimed = [await store.claim("a", limit=1, lease_seconds=1_000) for _ in range(10)]
        shards = [shard_of(lease.rollout_id, 2) for leases in claimed for lease in leases]
        assert shards.count(0) == shards.count(1) == 5
        leases = await store.claim("a", limit=10, lease_seconds=1_000)
        assert [shard_of(lease.rollout_id, 2) for lease in leases].count(0) == 5


async def test_whoever_waits_is_woken_by_any_shard(shared_shards):
    async with opened_shards(shard_configs(*shared_shards)) as store:
        for shard in (0, 1):
            assert await store.claim("a", limit=5, lease_seconds=1_000) == []
            (name,) = names_of_shard(shard, 1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(store.wait_for_work)
                await anyio.wait_all_tasks_blocked()
                await store.submit(order(name))
            with anyio.fail_after(PATIENCE_SECONDS):
                await store.wait_for_work()
            assert [lease.rollout_id for lease in await store.claim("a", limit=5, lease_seconds=1_000)] == [name]


async def test_the_shards_of_a_cluster_of_redis_have_slots_of_their_own():
    configs = [RedisConfig("redis://x", "rollouts", shard=number, shards=4) for number in range(4)]
    assert [one.root for one in configs] == [f"{{rollouts.{number}}}" for number in range(4)]


async def test_a_claim_returns_what_it_has_although_every_shard_has_failed_since(shared_shards, monkeypatch):
    async with opened_shards(shard_configs(*shared_shards)) as store:
        await store.submit(order(names_of_shard(1, 1)[0]))
        first, other = store.shards[1], store.shards[0]
        claim, calls = first.claim, count()

        async def refuse(*_, **__):
            raise StoreError("Redis is full")

        async def claim_once(*arguments, **options):
            return await (refuse() if next(calls) else claim(*arguments, **options))

        monkeypatch.setattr(other, "claim", refuse)
        monkeypatch.setattr(first, "claim", claim_once)
        leases = await store.claim("a", limit=2, lease_seconds=1_000)
        assert [lease.rollout_id for lease in leases] == list(await store.held("a"))


@pytest.mark.parametrize("ticks", range(1, 6))
async def test_a_call_to_a_shard_that_was_away_for_a_moment_fails(shared_shards, ticks):
    async def ask():
        with pytest.raises(StoreError):
            await shard.ask(may_answer.wait)
        may_answer.set()

    async with opened_shards(shard_configs(*shared_shards)) as store, anyio.create_task_group() as tasks:
        shard, may_answer = store._shards[1], anyio.Event()
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        shard._set(StoreError("it does not answer"))
        for _ in range(ticks):
            await anyio.lowlevel.checkpoint()
        shard._set(None)


async def test_nobody_waits_for_a_call_that_ended_with_the_store(shared_shards):
    async def ask():
        with pytest.raises(StoreError):
            await shard.ask(anyio.sleep_forever)

    async with opened_shards(shard_configs(*shared_shards)) as store, anyio.create_task_group() as tasks:
        shard = store._shards[1]
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        shard._tasks.cancel_scope.cancel()

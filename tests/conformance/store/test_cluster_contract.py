"""Every kind of store keeps the `ClusterStore` contract."""

from collections.abc import AsyncIterator

import anyio
import pytest

from api_schemas.nodes import NodeState
from api_schemas.rollouts import RolloutState
from rollout_service.base.errors import ConflictError, NotFoundError
from rollout_service.store import Store
from rollout_service.store.cluster_contract import (
    DEAD_SECONDS,
    LEADER_SECONDS,
    ClusterStore,
    NameTakenError,
    NodeReport,
)
from rollout_service.store.redis import RedisStore
from tests.support.clocks import ManualClock
from tests.support.redis_members import RedisMembers, redis_members
from tests.support.redis_server import RedisServer
from tests.support.store.rollouts import order


def report(name: str = "n1", owner: str = "a", **fields: object) -> NodeReport:
    given = {"environments": ["calc", "code"], "images": ["calc"], "places": 4} | fields
    return NodeReport(name, owner, **given)  # type: ignore[arg-type]


async def kinds_of_events(store: Store) -> list[str]:
    return [event.kind for event in await store.events(after=0)]


async def test_a_node_reports_and_leaves(store):
    assert await store.cluster.nodes() == []
    await store.cluster.join(report())
    beat = await store.cluster.heartbeat(report(places=5, labels=["gpu"], view='{"x": 1}'))
    assert beat.is_member
    assert (beat.state, beat.places, list(beat.dead)) == (NodeState.READY, 5, [])
    assert (beat.environments, beat.images) == ({"calc": 1, "code": 1}, {"calc": 1})
    [node] = await store.cluster.nodes()
    assert node.report.owner == "a"
    assert (list(node.report.labels), node.report.view) == (["gpu"], '{"x": 1}')
    assert node.state is NodeState.READY
    assert 0 <= node.silent_seconds < 5
    await store.cluster.leave("a")
    await store.cluster.leave("a")
    assert await store.cluster.nodes() == []
    assert not (await store.cluster.heartbeat(report())).is_member


async def test_a_name_belongs_to_one_live_service(store):
    await store.cluster.join(report())
    with pytest.raises(NameTakenError, match="n1"):
        await store.cluster.join(report(owner="b"))
    await store.cluster.join(report())
    await store.cluster.join(report(owner="b"), replacing="a")
    assert [node.report.owner for node in await store.cluster.nodes()] == ["b"]
    assert not (await store.cluster.heartbeat(report(owner="a"))).is_member
    await store.cluster.leave("a")
    assert (await store.cluster.heartbeat(report(owner="b"))).is_member


async def test_a_draining_node_counts_for_nothing_until_it_resumes(store):
    await store.cluster.join(report())
    await store.cluster.change_state("n1", NodeState.DRAINING)
    await store.cluster.change_state("n1", NodeState.DRAINING)
    beat = await store.cluster.heartbeat(report())
    assert (beat.is_member, beat.state, beat.places) == (True, NodeState.DRAINING, 0)
    assert not any(beat.environments.values())
    assert not any(beat.images.values())
    assert [node.state for node in await store.cluster.nodes()] == [NodeState.DRAINING]
    await store.cluster.change_state("n1", NodeState.READY)
    beat = await store.cluster.heartbeat(report())
    assert (beat.state, beat.places, beat.images) == (NodeState.READY, 4, {"calc": 1})
    events = await kinds_of_events(store)
    assert events[-2:] == ["node.draining", "node.ready"]


async def test_commands_to_unknown_and_live_nodes_are_refused(store):
    for state in (NodeState.DRAINING, NodeState.READY):
        with pytest.raises(NotFoundError, match="n9"):
            await store.cluster.change_state("n9", state)
    with pytest.raises(NotFoundError, match="n9"):
        await store.cluster.remove("n9")
    await store.cluster.join(report())
    with pytest.raises(ConflictError, match="alive"):
        await store.cluster.remove("n1")


async def test_changes_of_nodes_wake_whoever_waits(store):
    seen = await store.cluster.wait_for_change(0)
    await store.cluster.join(report())
    with anyio.fail_after(5):
        seen = await store.cluster.wait_for_change(seen)
    with anyio.move_on_after(0.05) as scope:
        await store.cluster.wait_for_change(seen)
    assert scope.cancelled_caught
    await store.cluster.change_state("n1", NodeState.DRAINING)
    with anyio.fail_after(5):
        await store.cluster.wait_for_change(seen)


async def test_a_role_has_one_leader_and_each_new_one_a_higher_token(store):
    assert await store.cluster.leader("runs") is None
    first = await store.cluster.lead("runs", "a")
    assert first is not None
    assert await store.cluster.lead("runs", "a") == first
    assert await store.cluster.lead("runs", "b") is None
    assert await store.cluster.lead("retention", "b") is not None, "roles are independent"
    assert await store.cluster.leader("runs") == first
    await store.cluster.resign("runs", "b")
    assert await store.cluster.leader("runs") == first
    await store.cluster.resign("runs", "a")
    await store.cluster.resign("runs", "a")
    second = await store.cluster.lead("runs", "b")
    assert (second.owner, second.role) == ("b", "runs")
    assert second.token > first.token


async def waits_for_role(cluster: ClusterStore, seconds: float) -> bool:
    """Return whether a service still waits for the role after some time."""
    with anyio.move_on_after(seconds) as scope:
        await cluster.wait_for_role("runs")
    return scope.cancelled_caught


async def test_whoever_waits_for_a_role_is_woken_when_it_is_resigned_or_its_leader_leaves(store):
    await store.cluster.join(report())
    for give_up in (lambda: store.cluster.resign("runs", "a"), lambda: store.cluster.leave("a")):
        assert await store.cluster.lead("runs", "a") is not None
        assert await store.cluster.lead("runs", "b") is None
        assert await waits_for_role(store.cluster, 0.1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waits_for_role, store.cluster, 5.0)
            await give_up()
            assert not await waits_for_role(store.cluster, 1.0)
    assert await store.cluster.lead("runs", "b") is not None


@pytest.mark.redis
async def test_heartbeats_tell_how_long_the_leader_of_a_role_still_has_it(members, clock):
    cluster = members.cluster
    await cluster.join(report("n2", "b"))
    assert await cluster.lead("runs", "a") is not None
    assert await cluster.lead("runs", "b") is None
    clock.now += LEADER_SECONDS - 0.3
    await cluster.heartbeat(report("n2", "b"))
    assert await waits_for_role(cluster, 0.1)
    assert await cluster.lead("runs", "a") is not None
    await cluster.heartbeat(report("n2", "b"))
    assert await waits_for_role(cluster, 0.4), "it was renewed, which the heartbeat told"
    clock.now += LEADER_SECONDS - 0.2
    await cluster.heartbeat(report("n2", "b"))
    assert not await waits_for_role(cluster, 1.0), "nobody has renewed it"
    clock.now += 0.2
    assert await cluster.lead("runs", "b") is not None


async def test_a_node_that_leaves_resigns_its_roles(store):
    await store.cluster.join(report())
    assert await store.cluster.lead("runs", "a") is not None
    await store.cluster.leave("a")
    assert await store.cluster.lead("runs", "b") is not None


@pytest.fixture
async def members(shared_redis: RedisServer, clock: ManualClock) -> AsyncIterator[RedisMembers]:
    async with redis_members(shared_redis.config(), clock) as made:
        yield made


@pytest.mark.redis
async def test_a_silent_node_is_declared_dead_by_another(members, clock):
    cluster = members.cluster
    await cluster.join(report("n1", "a"))
    await cluster.join(report("n2", "b", places=3, images=[]))
    assert await cluster.lead("runs", "a") is not None
    beat = await cluster.heartbeat(report("n2", "b", places=3, images=[]))
    assert (beat.places, beat.environments, beat.images) == (7, {"calc": 2, "code": 2}, {"calc": 1})
    assert beat.states == {"ready": 2}
    for seconds in (4.0, 4.0, DEAD_SECONDS - 8.1):
        clock.now += seconds
        assert (await cluster.heartbeat(report("n2", "b"))).dead == []
    clock.now += 0.1
    beat = await cluster.heartbeat(report("n2", "b"))
    assert beat.dead == ["n1"]
    assert (beat.places, beat.environments, beat.states) == (
        4,
        {"calc": 1, "code": 1},
        {"ready": 1, "dead": 1},
    )
    assert [(node.report.name, node.state) for node in await cluster.nodes()] == [
        ("n1", NodeState.DEAD),
        ("n2", NodeState.READY),
    ]
    assert not (await cluster.heartbeat(report("n1", "a"))).is_member
    assert await cluster.lead("runs", "a") is None, "it is not a member"
    assert await cluster.lead("runs", "b") is not None
    with pytest.raises(ConflictError, match="dead"):
        await cluster.change_state("n1", NodeState.DRAINING)
    await cluster.join(report("n1", "a"))
    beat = await cluster.heartbeat(report("n1", "a"))
    assert (beat.is_member, beat.places, beat.states) == (True, 8, {"ready": 2})
    kinds = [(event.kind, event.subject) for event in await members.events(after=0)]
    assert kinds == [("node.joined", "n1"), ("node.joined", "n2"), ("node.dead", "n1"), ("node.joined", "n1")]


@pytest.mark.redis
async def test_nobody_is_dead_because_redis_was_away(members, clock):
    cluster = members.cluster
    await cluster.join(report("n1", "a"))
    await cluster.join(report("n2", "b"))
    await cluster.heartbeat(report("n2", "b"))
    clock.now += 10 * DEAD_SECONDS
    assert (await cluster.heartbeat(report("n2", "b"))).dead == []
    clock.now += DEAD_SECONDS / 4
    assert (await cluster.heartbeat(report("n1", "a"))).is_member
    for _ in range(4):
        assert (await cluster.heartbeat(report("n2", "b"))).dead == []
        clock.now += DEAD_SECONDS / 4
    assert (await cluster.heartbeat(report("n2", "b"))).dead == ["n1"], "it had its time to report again"


@pytest.mark.redis
async def test_a_dead_node_can_be_removed_and_its_name_taken(members, clock):
    cluster = members.cluster
    await cluster.join(report("n1", "a"))
    await cluster.join(report("n2", "b"))
    await cluster.heartbeat(report("n2", "b"))
    for _ in range(4):
        clock.now += DEAD_SECONDS / 4
        await cluster.heartbeat(report("n2", "b"))
    await cluster.remove("n1")
    assert [node.report.name for node in await cluster.nodes()] == ["n2"]
    clock.now += DEAD_SECONDS
    await cluster.join(report("n2", "c"))
    assert not (await cluster.heartbeat(report("n2", "b"))).is_member
    beat = await cluster.heartbeat(report("n2", "c"))
    assert (beat.is_member, beat.places, beat.states) == (True, 4, {"ready": 1})


@pytest.mark.redis
async def test_a_leader_that_is_silent_is_followed(members, clock):
    cluster = members.cluster
    first = await cluster.lead("runs", "a")
    clock.now += LEADER_SECONDS - 0.1
    assert await cluster.lead("runs", "b") is None
    assert await cluster.lead("runs", "a") == first
    clock.now += LEADER_SECONDS
    assert await cluster.leader("runs") is None
    second = await cluster.lead("runs", "b")
    assert second.token > first.token
    assert await cluster.lead("runs", "a") is None


@pytest.mark.redis
async def test_a_change_at_one_service_wakes_another(shared_redis):
    config = shared_redis.config()
    async with redis_members(config) as one, redis_members(config) as other:
        seen = await other.cluster.wait_for_change(0)
        await one.cluster.join(report())
        with anyio.fail_after(5):
            await other.cluster.wait_for_change(seen)
        assert [node.report.name for node in await other.cluster.nodes()] == ["n1"]


@pytest.mark.redis
async def test_the_rollouts_of_a_dead_node_are_queued_again_and_it_can_do_nothing(shared_redis, clock):
    async with await RedisStore.open(shared_redis.config(), is_gone=lambda _: False, clock=clock) as store:
        await store.cluster.join(report("n1", "a"))
        await store.cluster.join(report("n2", "b"))
        for rollout_id in ("begun", "waiting"):
            await store.submit(order(rollout_id))
        begun, _ = await store.claim("a", limit=2, lease_seconds=1_000)
        assert await store.advance(begun, "a", RolloutState.ROLLOUT)
        await store.cluster.heartbeat(report("n2", "b"))
        for _ in range(3):
            clock.now += DEAD_SECONDS / 4
            assert (await store.cluster.heartbeat(report("n2", "b"))).dead == []
        clock.now += DEAD_SECONDS / 4
        assert (await store.cluster.heartbeat(report("n2", "b"))).dead == ["n1"]
        assert await store.counts() == {RolloutState.QUEUED: 2}
        assert await store.claim("a", limit=2, lease_seconds=1_000) == [], "it has not joined again"
        assert await store.renew("a", ["begun", "waiting"], lease_seconds=1_000) == ["begun", "waiting"]
        assert not await store.advance(begun, "a", RolloutState.EVALUATE)
        [dead] = [event for event in await store.events(after=0) if event.kind == "node.dead"]
        assert (dead.subject, dead.data) == ("n1", {"requeued": 2})
        taken = await store.claim("b", limit=2, lease_seconds=1_000)
        assert [(lease.rollout_id, lease.attempt) for lease in taken] == [("begun", 2), ("waiting", 1)]
        await store.cluster.leave("b")
        await store.cluster.join(report("n1", "a"))
        again = await store.claim("a", limit=2, lease_seconds=1_000)
        assert [(lease.rollout_id, lease.attempt) for lease in again] == [("begun", 2), ("waiting", 1)]

"""A node joins, follows commands, drops lost work and leaves; a role passes from one leader to the next."""

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from api_schemas.nodes import NodeState
from rollout_service.cluster.identity import ServiceIdentity
from rollout_service.cluster.leadership import Leadership
from rollout_service.cluster.membership import Membership
from rollout_service.store.cluster_contract import (
    DEAD_SECONDS,
    LEADER_SECONDS,
    ClusterStore,
    Heartbeat,
    NameTakenError,
    NodeReport,
    RoleLease,
)
from tests.support.clocks import ManualClock
from tests.support.redis_members import RedisMembers, redis_members
from tests.support.redis_server import RedisServer
from tests.support.waiting import until

pytestmark = pytest.mark.redis


@pytest.fixture
async def members(shared_redis: RedisServer, clock: ManualClock) -> AsyncIterator[RedisMembers]:
    async with redis_members(shared_redis.config(), clock) as made:
        yield made


@dataclass
class Member:
    """A node under test, and what it was told."""

    cluster: ClusterStore
    name: str = "n1"
    owner: str = field(default_factory=lambda: str(ServiceIdentity.create()))
    beats: list[Heartbeat] = field(default_factory=list)
    drops: int = 0

    async def look(self) -> None:
        pass

    def report(self) -> NodeReport:
        return NodeReport(self.name, self.owner, places=4)

    async def drop(self) -> None:
        self.drops += 1

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[Membership]:
        membership = Membership(
            self.cluster, self.report, look=self.look, on_beat=self.beats.append, drop_work=self.drop
        )
        async with membership.joined():
            yield membership

    async def until(self, state: NodeState, *, drops: int = 0) -> None:
        await until(lambda: self.beats[-1].state is state and self.beats[-1].is_member and self.drops == drops, 15)


async def names(cluster: ClusterStore) -> list[str]:
    return [node.report.name for node in await cluster.nodes()]


async def test_a_node_follows_a_drain_and_its_end(members):
    one = Member(members.cluster)
    async with one.joined():
        await members.cluster.change_state("n1", NodeState.DRAINING)
        await one.until(NodeState.DRAINING)
        await members.cluster.change_state("n1", NodeState.READY)
        await one.until(NodeState.READY)
    assert one.drops == 0


@pytest.mark.parametrize("state", [NodeState.READY, NodeState.DRAINING])
async def test_a_node_that_was_declared_dead_drops_its_work_and_joins_again(members, clock, state):
    other = NodeReport("n2", "b", places=1)
    await members.cluster.join(other)
    one = Member(members.cluster)
    async with one.joined():
        await members.cluster.change_state("n1", state)
        await one.until(state)
        with anyio.fail_after(15):
            while "n1" not in (await members.cluster.heartbeat(other)).dead:
                clock.now += DEAD_SECONDS / 4
        await one.until(state, drops=1)
        assert await names(members.cluster) == ["n1", "n2"]
        assert (await members.cluster.heartbeat(other)).is_member


async def test_the_name_of_a_crashed_service_of_this_host_is_free_at_once(members):
    program = "from rollout_service.cluster.identity import ServiceIdentity as I; print(I.create())"
    dead = (await anyio.run_process([sys.executable, "-c", program])).stdout.decode().strip()
    await members.cluster.join(NodeReport("n1", dead))
    one = Member(members.cluster)
    began = time.monotonic()
    async with one.joined():
        [node] = await members.cluster.nodes()
        assert node.report.owner == one.owner
    assert time.monotonic() - began < DEAD_SECONDS / 2
    kinds = [event.kind for event in await members.events(after=0)]
    assert kinds == ["node.joined", "node.dead", "node.joined", "node.left"]


async def test_the_name_of_a_silent_service_elsewhere_is_free_once_it_is_dead(members, clock):
    await members.cluster.join(NodeReport("n1", "elsewhere"))
    one = Member(members.cluster)

    async def pass_time() -> None:
        await anyio.sleep(0.1)
        clock.now += DEAD_SECONDS

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pass_time)
        async with one.joined():
            [node] = await members.cluster.nodes()
            assert node.report.owner == one.owner


async def test_a_second_node_of_a_live_nodes_name_is_refused(members, clock):
    one, other = Member(members.cluster), Member(members.cluster)
    async with one.joined(), anyio.create_task_group() as tasks:

        async def pass_time() -> None:
            while True:
                await anyio.sleep(0.1)
                clock.now += 0.1

        tasks.start_soon(pass_time)
        with pytest.raises(NameTakenError, match="n1") as caught:
            async with other.joined():
                raise AssertionError("it joined")
        assert "name" in caught.value.hint
        tasks.cancel_scope.cancel()
    assert one.drops == 0


@dataclass
class Leader:
    """A service that wants to lead, and the leases under which it worked."""

    cluster: ClusterStore
    owner: str
    leases: list[RoleLease] = field(default_factory=list)
    is_working: bool = False

    async def work(self, lease: RoleLease) -> None:
        self.leases.append(lease)
        self.is_working = True
        try:
            await anyio.sleep_forever()
        finally:
            self.is_working = False

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[None]:
        async with Leadership(self.cluster, self.owner).leading({"runs": self.work}):
            yield

    async def until(self, is_working: bool) -> None:
        await until(lambda: self.is_working is is_working, 15)


async def test_a_leader_that_leaves_is_followed_by_another(members):
    one, other = Leader(members.cluster, "a"), Leader(members.cluster, "b")
    async with one.leading():
        await one.until(is_working=True)
        async with other.leading():
            with anyio.CancelScope() as scope:
                async with Leader(members.cluster, "c").leading():
                    scope.cancel()
            assert not other.is_working
            assert await members.cluster.lead("runs", "a") == one.leases[0], "it still leads"
    async with other.leading():
        await other.until(is_working=True)
    assert not one.is_working
    assert other.leases[0].token > one.leases[0].token


async def test_a_leader_whose_lease_ran_out_stops_once_another_leads(members, clock):
    one = Leader(members.cluster, "a")
    async with one.leading():
        await one.until(is_working=True)
        clock.now += LEADER_SECONDS
        taken = await members.cluster.lead("runs", "b")
        assert taken is not None
        await one.until(is_working=False)
        await members.cluster.resign("runs", "b")
        await one.until(is_working=True)
    assert [lease.token for lease in one.leases] == [taken.token - 1, taken.token + 1]


class CountingCluster:
    """A cluster that counts how often a service asks for a role."""

    def __init__(self, cluster: ClusterStore) -> None:
        self.cluster, self.asked = cluster, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cluster, name)

    async def lead(self, role: str, owner: str) -> RoleLease | None:
        self.asked += 1
        return await self.cluster.lead(role, owner)


async def test_a_member_asks_for_a_role_only_when_it_may_be_free(members):
    counting = CountingCluster(members.cluster)
    one, other = Leader(members.cluster, "a"), Leader(counting, "b")
    async with Member(members.cluster).joined(), one.leading():
        await one.until(is_working=True)
        async with other.leading():
            await anyio.sleep(LEADER_SECONDS + 0.5)
            assert counting.asked == 1
            assert not other.is_working
            await members.cluster.resign("runs", "a")
            await other.until(is_working=True)
            assert counting.asked == 2


async def test_a_leader_stops_before_its_lease_ends_if_the_store_does_not_answer(own_redis):
    async with redis_members(own_redis.config(answer_seconds=60.0)) as members:
        one = Leader(members.cluster, "a")
        async with one.leading():
            await one.until(is_working=True)
            began = time.monotonic()
            with own_redis.paused():
                await one.until(is_working=False)
                assert time.monotonic() - began < LEADER_SECONDS + 0.5
            await one.until(is_working=True)

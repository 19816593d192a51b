"""A node stays a member, and stays drained, whatever its store and its sandbox provider do meanwhile."""

from dataclasses import dataclass, field

import anyio

from api_schemas.nodes import HoldView, NodeState, NodeView, StageOverview
from rollout_service.base.errors import StoreError
from rollout_service.cluster import membership
from rollout_service.cluster.membership import ClusterNodes, Membership
from rollout_service.store import retrying
from rollout_service.store.cluster_contract import Heartbeat, NodeRecord, NodeReport
from tests.support.waiting import until

BUSY = NodeView(
    node="n1", cpus=8, provider="local", enforced=[], rollouts=6, finished=9, places=8, live=5, in_use=4, warm=1,
    waiting=2, target=6, ceiling=16, holds=[HoldView(resource="memory", reason="memory: 3.1 GiB available")],
    stages=[StageOverview(stage="init", working=1, workers=2, waiting=3, places=4)],
)  # fmt: skip


@dataclass
class Cluster:
    """A store with one node, which is told at once of every change."""

    is_member: bool = False
    state: NodeState = NodeState.READY
    refusals: int = 0
    """How many changes of a state fail."""
    beats: list[Heartbeat] = field(default_factory=list)

    async def join(self, report, *, replacing=None):
        self.is_member, self.state = True, NodeState.READY

    async def leave(self, owner):
        self.is_member = False

    async def heartbeat(self, report):
        return Heartbeat(is_member=self.is_member, state=self.state)

    async def change_state(self, name, state):
        self.refusals -= 1
        if self.refusals >= 0:
            raise StoreError("it does not answer")
        self.state = state

    async def wait_for_change(self, after):
        await anyio.sleep(0.01)
        return after + 1

    async def nodes(self):
        return [NodeRecord(NodeReport("n1", "owner", view=BUSY.model_dump_json()), self.state, 12.0)]


async def nothing():
    pass


def member(cluster, *, look=nothing):
    report = NodeReport("n1", "owner")
    return Membership(cluster, lambda: report, look=look, on_beat=cluster.beats.append, drop_work=nothing)


async def test_a_node_whose_provider_hangs_goes_on_reporting(monkeypatch):
    monkeypatch.setattr(membership, "LOOK_SECONDS", 0.0)
    hanging = anyio.Event()

    async def look():
        if cluster.beats:
            hanging.set()
            await anyio.sleep_forever()

    cluster = Cluster()
    async with member(cluster, look=look).joined():
        with anyio.fail_after(5):
            await hanging.wait()
        seen = len(cluster.beats)
        await until(lambda: len(cluster.beats) > seen + 1)


async def test_a_drain_goes_on_though_the_store_fails_after_the_node_has_joined_again(monkeypatch):
    monkeypatch.setattr(retrying, "STORE_RETRY_SECONDS", 0.0)
    cluster = Cluster()
    async with member(cluster).joined():
        cluster.state = NodeState.DRAINING
        await until(lambda: cluster.beats[-1].state is NodeState.DRAINING)
        seen = len(cluster.beats)
        cluster.is_member, cluster.refusals = False, 2
        await until(lambda: cluster.refusals < 0 and len(cluster.beats) > seen + 1)
    assert {beat.state for beat in cluster.beats[seen:]} == {NodeState.DRAINING}


async def test_a_dead_node_is_listed_without_the_work_of_its_last_heartbeat():
    nodes = ClusterNodes(Cluster(state=NodeState.DEAD), lambda: NodeReport("n2", "another"))
    [dead] = await nodes.list()
    assert (dead.rollouts, dead.places, dead.live, dead.in_use, dead.warm, dead.waiting, dead.target) == (0,) * 7
    assert (dead.stages, dead.holds, dead.pressure) == ([], [], None)
    assert (dead.finished, dead.cpus, dead.ceiling) == (9, 8, 16), "what it was remains"

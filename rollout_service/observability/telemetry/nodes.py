"""Metrics of the cluster that this node is a member of, read when the metrics are.

Guarantee: each state of a node has a value, so an alert on `dead` never meets an absent series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from api_schemas.nodes import NodeState
from rollout_service.store.cluster_contract import Heartbeat


@dataclass(frozen=True, slots=True)
class NodeMetrics(Collector):
    """The nodes by state, and the roles of this one."""

    beat: Callable[[], Heartbeat]
    """Returns the answer to the last heartbeat."""
    roles: Callable[[], Iterable[str]]
    """Returns the roles that this node leads."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as of the last heartbeat."""
        nodes = GaugeMetricFamily("rollout_nodes", "Nodes that share the store, by state", labels=["state"])
        states = self.beat().states
        for state in NodeState:
            nodes.add_metric([state], states.get(state, 0))
        yield nodes
        leads = GaugeMetricFamily(
            "rollout_node_leads", "1 for each role that this node leads", labels=["role"]
        )
        for role in sorted(self.roles()):
            leads.add_metric([role], 1)
        yield leads

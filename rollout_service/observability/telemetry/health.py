"""Metrics of engines, store, disks and cluster. Every state has a value, so alerts never meet an absent series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from api_schemas.inference import BackendState, BackendView
from api_schemas.nodes import NodeState
from rollout_service.base.errors import StoreError
from rollout_service.observability.telemetry.families import counter, gauge
from rollout_service.store.cluster_contract import Heartbeat
from rollout_service.store.contract import Store


@dataclass(frozen=True, slots=True)
class HealthMetrics(Collector):
    backends: Callable[[], Iterable[BackendView]]
    awaited: Callable[[], Iterable[tuple[str, str]]]
    """The pools and ids of engines that are to be registered, and do not serve yet."""
    frozen_version_changes: Callable[[], Mapping[str, int]]
    """How often the version of each frozen pool has changed."""
    store: Store
    store_problem: Callable[[], StoreError | None]
    """Why the store, or that of live sessions, cannot be used."""
    disks: Callable[[], Mapping[str, int]]
    """The free bytes by folder."""

    def collect(self) -> Iterator[Metric]:
        yield from self._backends()
        yield from self._store()
        yield gauge("rollout_disk_free_bytes", "Free space where files are kept", ["path"], self.disks())

    def _backends(self) -> Iterator[Metric]:
        views = list(self.backends())
        states = Counter((view.pool, view.state) for view in views)
        pools = sorted({view.pool for view in views})
        labels = ["pool", "backend"]
        up = dict.fromkeys(self.awaited(), 0.0)
        up |= {(view.pool, view.backend_id): float(view.state is not BackendState.FAILED) for view in views}
        yield gauge("rollout_backend_up", "1 for an engine that answers, else 0", labels, up)
        counts = {(pool, state): states[pool, state] for pool in pools for state in BackendState}
        yield gauge("rollout_backends", "Engines by pool and state", ["pool", "state"], counts)
        text = "The version of an engine's weights; -1 if it reports none"
        versions = {(view.pool, view.backend_id): view.weight_version for view in views}
        yield gauge("rollout_backend_weight_version", text, labels, versions)
        text = "1 for an engine that samples with weights that this service did not give it, else 0"
        others = {(view.pool, view.backend_id): float(view.sampled_version is not None) for view in views}
        yield gauge("rollout_backend_other_version", text, labels, others)
        text = "Times that an engine of a frozen pool had another version than before"
        yield counter("rollout_frozen_version_changes", text, ["pool"], self.frozen_version_changes())

    def _store(self) -> Iterator[Metric]:
        failing = self.store_problem() is not None
        yield GaugeMetricFamily("rollout_store_bytes", "Size of the store's files", self.store.size_bytes())
        yield GaugeMetricFamily("rollout_store_failing", "1 while the store fails, else 0", float(failing))
        text = "1 while this shard of the store fails, else 0"
        numbers = range(len(self.store.shards))
        shards = {str(number): float(failing or number in self.store.failing) for number in numbers}
        yield gauge("rollout_store_shard_failing", text, ["shard"], shards)
        yield CounterMetricFamily("rollout_store_errors", "Calls to the store that failed", self.store.errors)
        yield from self.store.commit_seconds.collect()


def node_metrics(beat: Heartbeat, roles: Iterable[str]) -> Iterator[Metric]:
    states = {state: beat.states.get(state, 0) for state in NodeState}
    yield gauge("rollout_nodes", "Nodes that share the store, by state", ["state"], states)
    leads = dict.fromkeys(sorted(roles), 1)
    yield gauge("rollout_node_leads", "1 for each role that this node leads", ["role"], leads)

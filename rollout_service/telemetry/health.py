"""Metrics of what the service stands on, read when they are asked for: engines, store, disks.

Guarantee: every state of a backend has a value for each pool, so that an alert on `failed` needs no absent series.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from api_schemas.inference import BackendState, BackendView
from rollout_service.store.contract import Store


@dataclass(frozen=True, slots=True)
class HealthMetrics(Collector):
    """The figures of engines, store and disks."""

    backends: Callable[[], Iterable[BackendView]]
    store: Store
    disks: Callable[[], Mapping[str, int]]
    """Free bytes by folder."""

    def collect(self) -> Iterator[Metric]:
        """Return the figures as they are now."""
        yield from self._backends()
        yield from self._store()
        free = GaugeMetricFamily(
            "rollout_disk_free_bytes", "Free space where files are kept", labels=["path"]
        )
        for path, count in self.disks().items():
            free.add_metric([path], count)
        yield free

    def _backends(self) -> Iterator[Metric]:
        views = list(self.backends())
        states = Counter((view.pool, view.state) for view in views)
        backends = GaugeMetricFamily(
            "rollout_backends", "Engines by pool and state", labels=["pool", "state"]
        )
        for pool in sorted({view.pool for view in views}):
            for state in BackendState:
                backends.add_metric([pool, state], states[pool, state])
        yield backends
        versions = GaugeMetricFamily(
            "rollout_backend_weight_version",
            "The weights that an engine has; -1 where it says none",
            labels=["pool", "backend"],
        )
        for view in views:
            versions.add_metric([view.pool, view.backend_id], view.weight_version)
        yield versions

    def _store(self) -> Iterator[Metric]:
        failing = self.store.problem is not None
        yield GaugeMetricFamily("rollout_store_bytes", "Size of the store's files", self.store.size_bytes())
        yield GaugeMetricFamily("rollout_store_failing", "Whether the store fails at present", float(failing))
        yield CounterMetricFamily("rollout_store_errors", "Calls that the store failed", self.store.errors)

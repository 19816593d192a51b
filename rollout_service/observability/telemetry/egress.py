"""The traffic of sandboxes through allow-lists, as of at most `READ_SECONDS` ago, and their time on servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from rollout_service.observability.telemetry.families import counter
from sandboxes import SandboxProvider
from sandboxes.egress.messages import EgressCounts

READ_SECONDS = 5.0


class EgressMeter:
    def __init__(self, provider: SandboxProvider, seconds: float = READ_SECONDS) -> None:
        self._provider = provider
        self._seconds = seconds
        self.counts = EgressCounts()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow, name="egress counts")
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def _follow(self) -> None:
        while True:
            self.counts = await self._provider.egress_counts()
            await anyio.sleep(self._seconds)


def use_metrics(seconds: float) -> Iterator[Metric]:
    text = "Lifetime of sandboxes on servers that may ask money for it"
    yield CounterMetricFamily("rollout_sandbox_use_seconds", text, value=seconds)


def egress_metrics(counts: EgressCounts) -> Iterator[Metric]:
    connections = "Connections from sandboxes to their proxies"
    yield CounterMetricFamily("rollout_egress_connections", connections, value=counts.connections)
    size = "Bytes between sandboxes and hosts on their lists"
    yield counter("rollout_egress_bytes", size, ["direction"], {"out": counts.bytes_out, "in": counts.bytes_in})
    refused = "Sandbox requests that the proxies refused"
    yield counter("rollout_egress_refused", refused, ["reason"], counts.refused)

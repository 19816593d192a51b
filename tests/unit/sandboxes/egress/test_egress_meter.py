"""The metrics show the egress of sandboxes as it was last read."""

from rollout_service.observability.telemetry.egress import EgressMeter
from rollout_service.observability.telemetry.metrics import Metrics
from sandboxes import SandboxInfo, SandboxProvider, SandboxSpec, SweepReport
from sandboxes.contract import Sandbox
from sandboxes.egress.messages import EgressCounts
from tests.support.waiting import until


class Counting(SandboxProvider):
    """A provider whose sandboxes have made one more connection at every reading."""

    name, isolates = "counting", True

    def __init__(self) -> None:
        self.looked = 0

    async def egress_counts(self) -> EgressCounts:
        self.looked += 1
        return EgressCounts(self.looked, self.looked, 20, 30, {"host": 2})

    async def start(self, spec: SandboxSpec) -> Sandbox:
        raise AssertionError("nobody starts one here")

    async def sweep(self) -> SweepReport:
        return SweepReport()

    def live(self) -> list[SandboxInfo]:
        return []

    async def close(self) -> None:
        """Do nothing."""


async def test_counts_are_read_repeatedly_and_shown():
    provider, metrics = Counting(), Metrics()
    meter = EgressMeter(provider, seconds=0.01)
    metrics.watch_egress(lambda: meter.counts)
    assert b"rollout_egress_connections_total 0.0" in metrics.render()
    async with meter.running():
        await until(lambda: provider.looked >= 3, 10)
    shown = metrics.render()
    assert f"rollout_egress_connections_total {meter.counts.connections}.0".encode() in shown
    assert b'rollout_egress_bytes_total{direction="out"} 20.0' in shown
    assert b'rollout_egress_bytes_total{direction="in"} 30.0' in shown
    assert b'rollout_egress_refused_total{reason="host"} 2.0' in shown

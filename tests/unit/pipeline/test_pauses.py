"""Sandboxes are paused during long waits alone; a failure to pause one is counted, logged once, and harms nobody."""

import anyio
import pytest
import structlog

from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.pipeline.pauses import Pauser
from sandboxes.config import PressureConfig
from sandboxes.errors import SandboxClosedError, SandboxPauseError
from sandboxes.scheduling.admission import AdmissionController
from sandboxes.scheduling.pressure import HostMetrics, PressureController

SOON = 0.01
GIB = 1 << 30


class PausedSandbox:
    """A sandbox that notes what is asked of it; the part of the contract that pauses need."""

    def __init__(self, name="one", answers=(True,)):
        self.id = name
        self.calls = []
        self.answers = list(answers)
        self.reclaimed = anyio.Event()

    async def pause(self):
        self.calls.append("pause")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def reclaim(self):
        self.calls.append("reclaim")
        await anyio.lowlevel.checkpoint()
        self.reclaimed.set()
        return 7


class Host:
    """A pauser, its metrics, and the host that it asks for memory."""

    def __init__(self, seconds=SOON):
        self.metrics = Metrics()
        self.admission = AdmissionController(PressureController(PressureConfig(), 4, 2), HostMetrics, ceiling=4)
        self.pauser = Pauser(seconds, self.admission, self.metrics)

    def has(self, free):
        self.admission.observe(HostMetrics(2, memory_available=free, memory_total=100 * GIB))

    def count(self, outcome):
        return self.metrics.registry.get_sample_value("rollout_sandbox_pauses_total", {"outcome": outcome})

    def reclaimed(self):
        return self.metrics.registry.get_sample_value("rollout_sandbox_reclaimed_bytes_total")


@pytest.fixture
def host():
    return Host()


async def wait_in(host, sandbox, seconds=3 * SOON):
    with host.pauser.waiting(sandbox):
        await anyio.sleep(seconds)


async def test_a_long_wait_pauses_the_sandbox_and_a_short_one_does_not(host):
    long, short = PausedSandbox(), PausedSandbox()
    async with host.pauser.running("processes"):
        await wait_in(host, short, 0)
        await wait_in(host, None)
        await wait_in(host, long)
        await anyio.sleep(2 * SOON)
    assert long.calls == ["pause"]
    assert short.calls == []
    assert (host.count("paused"), host.count("failed")) == (1, 0)


@pytest.mark.parametrize(("seconds", "pausing"), [(0, "memory"), (SOON, "none")])
async def test_nothing_is_paused_where_it_is_not_wanted_or_impossible(seconds, pausing):
    host, sandbox = Host(seconds), PausedSandbox()
    async with host.pauser.running(pausing) as pauser:
        assert pauser is None
    await wait_in(host, sandbox)
    assert sandbox.calls == []


@pytest.mark.parametrize("error", [SandboxPauseError("no"), ValueError("a defect")])
async def test_a_failure_is_counted_and_logged_once_and_the_wait_goes_on(host, error):
    with structlog.testing.capture_logs() as logs:
        async with host.pauser.running("memory"):
            for _ in range(3):
                await wait_in(host, PausedSandbox(answers=[error]))
            await wait_in(host, PausedSandbox(answers=[SandboxClosedError("it has ended")]))
            await wait_in(host, PausedSandbox(answers=[False]))
    assert (host.count("paused"), host.count("failed")) == (0, 3)
    assert [(line["event"], line["why"]) for line in logs] == [
        ("a sandbox could not be paused; more failures are only counted", str(error))
    ]


async def test_memory_is_taken_once_the_host_has_too_little_and_from_one_after_another(host):
    sandboxes = [PausedSandbox(str(number)) for number in range(3)]
    async with host.pauser.running("files"), anyio.create_task_group() as tasks:
        for sandbox in sandboxes:
            tasks.start_soon(wait_in, host, sandbox, 60)
        await anyio.sleep(3 * SOON)
        host.has(50 * GIB)
        await anyio.wait_all_tasks_blocked()
        assert [sandbox.calls for sandbox in sandboxes] == [["pause"]] * 3
        host.has(GIB)
        for sandbox in sandboxes:
            await sandbox.reclaimed.wait()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert host.reclaimed() == 21


async def test_no_memory_is_taken_after_the_wait(host):
    sandbox = PausedSandbox()
    async with host.pauser.running("files"):
        await wait_in(host, sandbox)
        host.has(GIB)
        await anyio.wait_all_tasks_blocked()
    assert sandbox.calls == ["pause"]


async def test_a_wait_at_the_end_of_the_service_is_not_disturbed(host):
    sandbox = PausedSandbox()
    async with anyio.create_task_group() as tasks, host.pauser.running("files"):
        tasks.start_soon(wait_in, host, sandbox)
        await anyio.wait_all_tasks_blocked()
    assert sandbox.calls == []

"""A provider whose sandboxes are only names: they are started, counted and closed, and run nothing."""

from collections.abc import Container
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from sandboxes import Sandbox, SandboxInfo, SandboxProvider, SandboxSpec, SweepReport
from sandboxes.errors import LimitExceededError, SandboxClosedError, SandboxStartError


class NamedSandbox(Sandbox):
    """A sandbox that records which sessions were opened and whether it is alive; another use fails the test."""

    def __init__(self, provider: "NamedProvider", number: int, spec: SandboxSpec) -> None:
        self._provider = provider
        self._id = f"s{number}"
        self._spec = spec
        self.sessions: set[str] = set()
        self.well = True

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    @property
    def workdir(self) -> str:
        return self._spec.workdir

    @property
    def healthy(self) -> bool:
        return self.well and self._id in self._provider.alive

    @property
    def limits_reached(self) -> tuple[LimitExceededError, ...]:
        return self._provider.limits_reached

    async def bash(self) -> Any:
        await anyio.lowlevel.checkpoint()
        self.sessions.add("bash")

    async def python(self) -> Any:
        await anyio.lowlevel.checkpoint()
        if self._provider.broken_python:
            raise SandboxStartError("no kernel")
        self.sessions.add("python")

    async def list_running(self) -> list[str]:
        return ["serve"]

    async def end_processes(self) -> None:
        await anyio.lowlevel.checkpoint()
        self._provider.endings += 1
        if self._provider.endings in self._provider.ended_at:
            raise SandboxClosedError("it has ended by itself")

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()
            self._provider.alive.pop(self._id, None)

    def _unused(self, *args: Any, **kwargs: Any) -> Any:
        pytest.fail("nothing is to run in this sandbox")

    exec = program = read_file = write_file = edit_file = list = _unused
    export_path = import_path = read_stream = write_stream = _unused


class NamedProvider(SandboxProvider):
    """Starts named sandboxes; `hold` makes starts wait, `failures` makes the next ones fail."""

    name = "named"
    isolates = True

    def __init__(self, failures: int = 0, ended_at: Container[int] = ()) -> None:
        """The `ended_at`-th calls to end processes find the sandbox ended."""
        self.failures = failures
        self.endings, self.ended_at = 0, ended_at
        self.alive: dict[str, NamedSandbox] = {}
        self.limits_reached: tuple[LimitExceededError, ...] = ()
        self.started = 0
        self.most = 0
        self.broken_python = False
        self.image = "first"
        self._go = anyio.Event()
        self._go.set()

    def hold(self) -> None:
        """Make every start wait from now on."""
        self._go = anyio.Event()

    def go(self) -> None:
        """Let starts continue."""
        self._go.set()

    async def identity(self, spec: SandboxSpec) -> str:
        await anyio.lowlevel.checkpoint()
        return f"{spec.image} {self.image}"

    async def start(self, spec: SandboxSpec) -> Sandbox:
        await anyio.lowlevel.checkpoint()
        await self._go.wait()
        if self.failures:
            self.failures -= 1
            raise SandboxStartError("the host said no")
        self.started += 1
        sandbox = NamedSandbox(self, self.started, spec)
        self.alive[sandbox.id] = sandbox
        self.most = max(self.most, len(self.alive))
        return sandbox

    async def sweep(self) -> SweepReport:
        return SweepReport()

    def live(self) -> list[SandboxInfo]:
        return [SandboxInfo(it.id, it.spec.label, "", self.name, 0.0, None) for it in self.alive.values()]

    async def close(self) -> None:
        for sandbox in list(self.alive.values()):
            await sandbox.close()

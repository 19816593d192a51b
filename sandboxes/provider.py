"""What the providers of this host share: record, folder, limits, launch, and the way back when any of it fails."""

import socket
import subprocess
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import zmq.asyncio

from sandboxes import reaper
from sandboxes.contract import SandboxInfo, SandboxProvider, SandboxSpec, SweepReport
from sandboxes.control import SCRIPT, ControlShell
from sandboxes.controlled import Backing, ControlledSandbox, Launched
from sandboxes.errors import SandboxClosedError, SandboxStartError
from sandboxes.kernel import KernelPaths, make_context
from sandboxes.limits import Group, Groups, Limits, raise_open_files
from sandboxes.process import MARKER, end_process
from sandboxes.rundir import RunFolder, new_run_folder, run_base

EXIT_GRACE = 2.0
KILL_WAIT = 4.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How to launch the control shell of one sandbox."""

    argv: list[str]
    env: dict[str, str]
    """Of the launcher alone."""
    image: str
    limits: Limits
    user: int
    group: int
    pipes_inside: str
    sockets_inside: str
    workdir: str
    session_env: dict[str, str] = field(default_factory=dict)
    python: str = "python3"


class Stragglers:
    """Ends processes of sandboxes by their mark. To find them takes a reading of all of /proc: closes share it."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._waiting: set[str] = set()

    async def end(self, sandbox_id: str) -> None:
        """End what is left of one sandbox."""
        batch = self._waiting
        batch.add(sandbox_id)
        async with self._lock:
            if batch is self._waiting:  # else it was done together with another that had to wait
                self._waiting = set()
                await anyio.to_thread.run_sync(reaper.kill_marked, batch)


class HostBacking(Backing):
    """The launcher's process, the folder, the control groups and the record of one sandbox."""

    def __init__(
        self, folder: RunFolder, group: Group | None, records: reaper.Records, stragglers: Stragglers
    ) -> None:
        self._folder = folder
        self._group = group
        self._records = records
        self._stragglers = stragglers
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def out_of_memory(self) -> bool:
        return self._group is not None and self._group.out_of_memory()

    async def release(self) -> None:
        """The record goes last, and stays for the next sweep where something could not be removed."""
        if self.process is not None:
            await end_process(self.process, grace=EXIT_GRACE, kill_wait=KILL_WAIT)
        if self._group is None and self.process is not None:
            await self._stragglers.end(self._folder.id)
        problem = await anyio.to_thread.run_sync(self._remove)
        if problem is None:
            self._records.remove(self._folder.id)

    def _remove(self) -> str | None:
        if self._group is not None:
            reaper.kill_group(self._group)
        return reaper.remove(self._folder.path, self._group)


class HostProvider(SandboxProvider):
    """Launches control shells on this host; a subclass says how."""

    def __init__(self, state_dir: Path, run_dir: Path | None, start_timeout: float) -> None:
        self._records = reaper.Records(state_dir)
        self._run_dir = run_dir
        self._start_timeout = start_timeout
        self._live: dict[str, ControlledSandbox] = {}
        self._context: zmq.asyncio.Context | None = None
        self._closed = False
        self._stragglers = Stragglers()
        raise_open_files()

    @abstractmethod
    async def plan(self, spec: SandboxSpec, folder: RunFolder) -> Plan:
        """How to launch the sandbox; nothing has been made yet. The errors of `start`."""

    @abstractmethod
    def groups(self) -> Groups:
        """Where control groups are made, if anywhere."""

    async def start(self, spec: SandboxSpec) -> ControlledSandbox:
        if self._closed:
            raise SandboxClosedError("the provider has been closed")
        folder = new_run_folder(run_base(self._run_dir))
        plan = await self.plan(spec, folder)
        # Between the record and the sandbox's own `close` nothing may be lost, so cancellation waits at the end.
        group_paths = self.groups().paths_of(folder.id)
        self._records.write(folder.id, self.name, folder.path, group_paths)
        backing = HostBacking(folder, None, self._records, self._stragglers)
        control: ControlShell | None = None
        try:
            group = self.groups().create(folder.id, plan.limits)
            backing = HostBacking(folder, group, self._records, self._stragglers)
            folder.create(plan.user, plan.group)
            script = folder.pipes / SCRIPT.name
            script.write_text(SCRIPT.read_text())
            script.chmod(0o644)
            backing.process, control = _launch(plan, folder, group)
            await self._until_ready(control, folder)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                if control is not None:
                    control.close()
                await backing.release()
            if isinstance(error, OSError):
                raise SandboxStartError(f"the sandbox could not be launched: {error}") from error
            raise
        sandbox = self.make_sandbox(self._launched(plan, folder, control, backing), spec)
        self._live[folder.id] = sandbox
        return sandbox

    async def _until_ready(self, control: ControlShell, folder: RunFolder) -> None:
        ready = None
        with anyio.move_on_after(self._start_timeout):
            ready = await control.ready()
        if ready is None:
            raise SandboxStartError(
                f"the sandbox was not ready within {self._start_timeout:.0f} s: {folder.said()}"
            )
        if not ready:
            raise SandboxStartError(f"the sandbox ended while it started: {folder.said()}")

    def _launched(
        self, plan: Plan, folder: RunFolder, control: ControlShell, backing: HostBacking
    ) -> Launched:
        if self._context is None:
            self._context = make_context()
        paths = KernelPaths(
            plan.sockets_inside, folder.sockets, folder.links, plan.pipes_inside, folder.pipes
        )
        return Launched(
            id=folder.id,
            provider=self.name,
            image=plan.image,
            control=control,
            backing=backing,
            kernel_paths=paths,
            context=self._context,
            workdir=plan.workdir,
            env=plan.session_env,
            python=plan.python,
            start_timeout=self._start_timeout,
        )

    def make_sandbox(self, launched: Launched, spec: SandboxSpec) -> ControlledSandbox:
        """The sandbox of a control shell that is ready."""
        return ControlledSandbox(launched, spec, self.forget)

    def forget(self, sandbox_id: str) -> None:
        """A sandbox has been closed."""
        self._live.pop(sandbox_id, None)

    async def sweep(self) -> SweepReport:
        return await anyio.to_thread.run_sync(reaper.sweep, self._records, self.name)

    def live(self) -> list[SandboxInfo]:
        return [sandbox.info for sandbox in self._live.values()]

    async def close(self) -> None:
        self._closed = True
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for sandbox in list(self._live.values()):
                    tasks.start_soon(sandbox.close)
            if self._context is not None:
                self._context.destroy(linger=0)
                self._context = None


def _launch(
    plan: Plan, folder: RunFolder, group: Group | None
) -> tuple[subprocess.Popen[bytes], ControlShell]:
    """Start the launcher with one end of a socket pair as its standard input."""
    ours, theirs = socket.socketpair()
    try:
        with theirs, folder.log.open("wb") as log:
            entries = "\n".join(str(path / "cgroup.procs") for path in (group.paths if group else ()))
            process = subprocess.Popen(
                plan.argv,
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env={**plan.env, MARKER: folder.id, "LAUNCH_GROUPS": entries},
                cwd="/",
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    return process, ControlShell(ours, folder.pipes)

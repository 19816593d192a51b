"""The base of providers on this host."""

import fcntl
import os
import socket
import subprocess
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, Self

import anyio
import anyio.to_thread

from sandboxes.contract import (
    DEFAULT_WORKDIR,
    LISTENER_ADDRESS,
    SandboxInfo,
    SandboxProvider,
    SandboxSpec,
    Snapshot,
    SweepReport,
)
from sandboxes.egress.host import EgressHost, ProxyOwner, SocketHandover
from sandboxes.egress.messages import EgressCounts
from sandboxes.egress.rules import AllowList
from sandboxes.errors import SandboxClosedError, SandboxConfigError, SandboxStartError
from sandboxes.host.children import ChildProcess, LingeringChildren
from sandboxes.host.processes import MARKER
from sandboxes.host.uid_leases import UserLease
from sandboxes.limits.cgroups import ControlGroup, ControlGroups, ResourceLimits, raise_open_files
from sandboxes.limits.violations import LimitMonitor
from sandboxes.limits.watchdog import Watchdog
from sandboxes.providers.layers import FileLayer
from sandboxes.providers.sandbox import SAVE_HINT, ControlledSandbox, LaunchedSandbox
from sandboxes.reclaim.host_resources import LauncherResources, LeftoverProcesses, ServiceResources
from sandboxes.reclaim.run_folders import RunFolder
from sandboxes.runtime.control import SCRIPT, Answers, ControlShell
from sandboxes.sessions.bash_state import read_state
from sandboxes.sessions.kernel import KernelPaths

PIPES, SOCKETS = "/run/rollout/pipes", "/run/rollout/sockets"
"""Where a sandbox with its own file system finds its pipes and its kernels' sockets."""

BASH, HIDDEN_BASH = "/bin/bash", "/dev/shm/.control"  # noqa: S108  in the sandbox, where nothing else runs yet
HIDE = (
    f'copy={HIDDEN_BASH}; cp {BASH} "$copy" 2>/dev/null && chmod 0111 "$copy" || copy={BASH}; exec "$copy" --norc "$@"'
)
"""Run the control shell from a copy of bash that can be executed but not read.

The kernel then lets no process inside look into it, trace it, or take its descriptors.
"""

OWNER_BACKLOG = 64
LINGER_SECONDS = 2.0
"""`close` waits so long for processes that were killed."""


@dataclass(frozen=True, slots=True)
class EgressPlan:
    allowed: AllowList
    port: int
    private: bool
    """Listed names may resolve to private addresses."""
    user: int
    group: int


ListenIn = Literal["sandbox", "host"]
"""A sandbox's owner listens in the sandbox's network, or in the host's."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    argv: list[str]
    """As `HostProvider.spawn` starts it."""
    env: dict[str, str]
    image: str
    limits: ResourceLimits
    user: int
    group: int
    pipes_inside: str
    sockets_inside: str
    workdir: str
    own_space: bool = False
    """The launcher makes the folder of the sockets, in a file system that may be its own."""
    session_env: dict[str, str] = field(default_factory=dict)
    python: str = "python3"
    egress: EgressPlan | None = None
    listens: ListenIn | None = None
    """The network of the owner's socket, if there is one."""
    prefix: tuple[str, ...] = ()
    lease: UserLease | None = None
    """The lease of `user`, if no other sandbox uses it."""
    layers: tuple[FileLayer, ...] = ()
    """Files besides the image, the newest first."""
    make_snapshot: Callable[[LauncherResources], Snapshot] | None = None
    """Called while the launcher is alive; None if no snapshot can be made here."""
    save_command: Callable[[int, int], list[str]] | None = None
    """The program that writes the files, for a launcher and a limit; None if they cannot be saved."""
    on_ready: Callable[[], None] | None = None
    """Called once the control shell answers, before anything else runs inside."""
    answers: bool = False
    """The control shell answers on a separate pipe, because its standard input is one-way."""


class Gate:
    """Holds a launcher until it is in its control groups; one that is never moved there ends.

    It makes its mounts meanwhile, since it takes the kernel 10 to 20 ms to move a process.
    """

    def __init__(self, group: ControlGroup) -> None:
        self._group = group
        self.descriptor, self._hold = os.pipe()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._hold)
        os.close(self.descriptor)

    async def admit(self, launcher: int) -> None:
        """Let the launcher go on in its control groups.

        Raises:
            OSError: It cannot be moved.
        """
        await anyio.to_thread.run_sync(self._group.join, launcher)
        os.write(self._hold, b"x")


LOG_BYTES = 1024 * 1024


class LaunchLog:
    """The output of a launcher, in memory of a fixed size: the image's bash writes there too, and may never stop."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, LOG_BYTES)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def save(self, path: Path) -> None:
        """Write to a file what has come so far."""
        written = os.lseek(self.descriptor, 0, os.SEEK_CUR)  # the launcher shares it, and may set it
        path.write_bytes(os.pread(self.descriptor, min(written, LOG_BYTES), 0))


class HostProvider(SandboxProvider):
    def __init__(self, state_dir: Path, run_dir: Path | None, start_timeout: float) -> None:
        self._service_resources = ServiceResources(state_dir, run_dir)
        self._start_timeout = start_timeout
        self._live: dict[str, ControlledSandbox] = {}
        self._closed = False
        self._leftovers = LeftoverProcesses()
        self.lingering_children = LingeringChildren()
        self._tally: Counter[str] = Counter()
        self._watchdog = Watchdog()
        self.egress = EgressHost(self.lingering_children)
        raise_open_files()

    @abstractmethod
    async def plan(self, spec: SandboxSpec, folder: RunFolder) -> LaunchPlan:
        """Plan a launch before anything has been made.

        Raises:
            SandboxError: The sandbox cannot be started, as in `SandboxProvider.start`.
        """

    def groups(self) -> ControlGroups:
        """Return where control groups can be made, if anywhere."""
        return ControlGroups({})

    async def start(self, spec: SandboxSpec) -> ControlledSandbox:
        if self._closed:
            raise SandboxClosedError("the provider has been closed")
        try:
            folder = await self._service_resources.new_folder(self.groups())
            plan = await self.plan(spec, folder)
        except OSError as error:
            raise SandboxStartError(f"the start of a sandbox cannot be prepared: {error}") from error
        # From here until the sandbox's own `close` nothing may be lost, so cleanup is shielded from cancellation.
        resources = self._resources_of(plan, folder, None)
        control: ControlShell | None = None
        try:
            _refuse_saved(plan, spec)
            folder.create(plan.user, plan.group)
            group = self.groups().create(folder.id, plan.limits)
            resources = self._resources_of(plan, folder, group)
            for layer in plan.layers:
                layer.hold()
                resources.before_release.push_async_callback(layer.release)
            script = folder.pipes / SCRIPT.name
            script.write_text(SCRIPT.read_text())
            script.chmod(0o644)
            with LaunchLog() as log:
                with (
                    SocketHandover() if _ports(plan) else nullcontext() as handover,
                    Gate(group) if group is not None else nullcontext() as gate,
                ):
                    control = await self._launch(plan, folder, gate, handover, resources, log)
                    if gate is not None and resources.pid is not None:
                        await gate.admit(resources.pid)
                    listener = await self._open_sockets(plan, folder, resources, handover)
                await self._wait_until_ready(control, folder, log)
            if plan.on_ready is not None:
                plan.on_ready()
            watched = await resources.watched_group()
            state = b"" if spec.saved is None else await anyio.to_thread.run_sync(read_state, spec.saved)
            launched = self._make_launched(plan, folder, control, resources, watched, listener, state)
            # Without isolation, paths below the folder's usual name are mapped to where it is.
            named = spec.workdir or (plan.workdir if self.isolates else DEFAULT_WORKDIR)
            sandbox = self.make_sandbox(launched, replace(spec, workdir=named))
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                if control is not None:
                    control.close()
                await resources.release()
            if isinstance(error, OSError):
                raise SandboxStartError(f"cannot launch the sandbox: {error}") from error
            raise
        self._live[folder.id] = sandbox
        return sandbox

    async def _launch(
        self,
        plan: LaunchPlan,
        folder: RunFolder,
        gate: Gate | None,
        handover: SocketHandover | None,
        resources: LauncherResources,
        log: LaunchLog,
    ) -> ControlShell:
        """Start a launcher whose input is one end of a socket pair; `resources` owns it at once."""
        env = {**plan.env, MARKER: folder.id}
        kept = [descriptor for layer in plan.layers for descriptor in layer.descriptors]
        if handover is not None:
            ports = " ".join(map(str, _ports(plan)))
            env |= {"LAUNCH_LISTENER": str(handover.descriptor), "LAUNCH_PORTS": ports}
            kept.append(handover.descriptor)
        if gate is not None:
            env |= {"LAUNCH_GATE": str(gate.descriptor)}
            kept.append(gate.descriptor)
        answers = Answers(folder.pipes) if plan.answers else None
        ours, theirs = socket.socketpair()
        try:
            with theirs, anyio.CancelScope(shield=True):
                resources.process = await self.spawn(plan.argv, env, theirs.fileno(), log.descriptor, kept)
            if handover is not None:
                handover.close_remote_end()
            return ControlShell(ours, folder.pipes, answers, plan.prefix)
        except BaseException:
            ours.close()
            if answers is not None:
                answers.close()
            raise

    async def spawn(
        self, argv: Sequence[str], env: Mapping[str, str], channel: int, output: int, kept: Sequence[int]
    ) -> ChildProcess:
        """Start a launcher that reads from `channel`, writes to `output`, and keeps other descriptors by their numbers.

        Raises:
            OSError: No process can be started.
            SandboxStartError: What starts it does not answer.
        """
        return subprocess.Popen(  # noqa: ASYNC220  it takes no time
            argv,
            stdin=channel,
            stdout=output,
            stderr=output,
            env=env,
            cwd="/",
            start_new_session=True,
            pass_fds=kept,
        )

    async def _open_sockets(
        self,
        plan: LaunchPlan,
        folder: RunFolder,
        resources: LauncherResources,
        handover: SocketHandover | None,
    ) -> socket.socket | None:
        """Serve the sandbox's proxy, and return the owner's socket, if there are any.

        If the launcher ends instead of handing them over, `_wait_until_ready` reports why.
        """
        received: list[socket.socket] = []
        if handover is not None:
            with anyio.move_on_after(self._start_timeout):
                received = await handover.receive()
        elif plan.listens == "host":
            received = [socket.create_server(("127.0.0.1", 0), backlog=OWNER_BACKLOG)]
        listener = received.pop() if received and plan.listens is not None else None
        if listener is not None:
            resources.before_release.callback(listener.close)
            listener.setblocking(False)
        if received and plan.egress is not None:
            resources.before_release.push_async_callback(self.egress.close, folder.id)
            way = plan.egress
            owner = ProxyOwner(folder.path.parent.name, way.user, way.group)
            await self.egress.open(folder.id, way.allowed, way.private, received[0], owner)
        return listener

    async def egress_counts(self) -> EgressCounts:
        return await self.egress.counts()

    async def _wait_until_ready(self, control: ControlShell, folder: RunFolder, log: LaunchLog | None = None) -> None:
        ready = None
        with anyio.move_on_after(self._start_timeout):
            ready = await control.wait_until_ready()
        if log is not None:
            log.save(folder.log)
        if ready is None:
            raise SandboxStartError(
                f"the sandbox was not ready within {self._start_timeout:.0f} s: {folder.log_tail()}",
                hint="raise sandbox.start_timeout, or check what keeps this host busy",
            )
        if not ready:
            raise SandboxStartError(f"the sandbox exited during its start: {folder.log_tail()}")

    def _make_launched(
        self,
        plan: LaunchPlan,
        folder: RunFolder,
        control: ControlShell,
        resources: LauncherResources,
        watched: ControlGroup | None,
        listener: socket.socket | None,
        shell_state: bytes = b"",
    ) -> LaunchedSandbox:
        """Make it without a wait, so that `close` ends the sandbox, or this sees that the provider has been closed."""
        if self._closed:
            raise SandboxClosedError("the provider has been closed")
        paths = KernelPaths(
            plan.sockets_inside,
            # The launcher's root, which nothing inside can change, since its mounts are not this process's.
            Path(f"/proc/{resources.pid}/root{folder.overlay}/sockets") if plan.own_space else folder.sockets,
            plan.pipes_inside,
            folder.pipes,
        )
        monitor = LimitMonitor(plan.limits, watched, resources.pid, folder.overlay, self._tally)
        resources.before_release.callback(monitor.close)
        self._watchdog.add(monitor, shares_user=self.isolates and plan.lease is None)
        if plan.limits.max_processes is not None:
            control.send_now("processes", str(monitor.launcher_tasks + plan.limits.max_processes))
        return LaunchedSandbox(
            id=folder.id,
            provider=self.name,
            image=plan.image,
            control=control,
            resources=resources,
            monitor=monitor,
            kernel_paths=paths,
            workdir=plan.workdir,
            env=plan.session_env,
            python=plan.python,
            start_timeout=self._start_timeout,
            listener=listener,
            make_snapshot=None if plan.make_snapshot is None else partial(plan.make_snapshot, resources),
            save_command=plan.save_command,
            shell_state=shell_state,
            has_network=(lambda: True) if plan.egress is None else partial(self.egress.serves, folder.id),
        )

    @property
    def limit_violations(self) -> Mapping[str, int]:
        return dict(self._tally)

    @property
    def lingering(self) -> int:
        return len(self.lingering_children)

    def _resources_of(self, plan: LaunchPlan, folder: RunFolder, group: ControlGroup | None) -> LauncherResources:
        resources = self.make_resources(folder, group)
        resources.lease = plan.lease
        return resources

    def make_resources(self, folder: RunFolder, group: ControlGroup | None) -> LauncherResources:
        return LauncherResources(folder, group, self._leftovers, self.lingering_children)

    def make_sandbox(self, launched: LaunchedSandbox, spec: SandboxSpec) -> ControlledSandbox:
        return ControlledSandbox(launched, spec, self.forget)

    def forget(self, sandbox_id: str) -> None:
        self._live.pop(sandbox_id, None)

    async def sweep(self) -> SweepReport:
        return await self._service_resources.sweep(self.groups())

    def live(self) -> list[SandboxInfo]:
        return [sandbox.info for sandbox in self._live.values()]

    async def close(self) -> None:
        self._closed = True
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for sandbox in list(self._live.values()):
                    tasks.start_soon(sandbox.close)
            await self.egress.aclose()
            await self.lingering_children.wait(LINGER_SECONDS)
            await self._service_resources.close()
            self._watchdog.close()


def _refuse_saved(plan: LaunchPlan, spec: SandboxSpec) -> None:
    if spec.saved is not None and plan.save_command is None:
        raise SandboxConfigError("no sandbox can begin with what was saved here", hint=SAVE_HINT)


def _ports(plan: LaunchPlan) -> list[int]:
    proxy = [plan.egress.port] if plan.egress is not None else []
    return [*proxy, LISTENER_ADDRESS[1]] if plan.listens == "sandbox" else proxy

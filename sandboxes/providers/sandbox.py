"""A sandbox built on a control shell: its sessions, programs and files, independent of the provider.

A provider launches `control.sh` in its own way and passes the result on as a `LaunchedSandbox`.
"""

import asyncio
import posixpath
import socket
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import anyio

from sandboxes.contract import (
    DEFAULT_OUTPUT_LIMIT,
    DEFAULT_TIMEOUT,
    DEFAULT_TREE_LIMIT,
    ExecResult,
    RunningProgram,
    SandboxInfo,
    SandboxSpec,
    SessionName,
    Snapshot,
)
from sandboxes.errors import (
    LimitExceededError,
    SandboxClosedError,
    SandboxConfigError,
    SandboxError,
    SandboxLostError,
    SandboxStartError,
    SandboxUnsavedError,
    SessionDiedError,
)
from sandboxes.host.processes import FirstProcess, children_of, command_line, descendants_of
from sandboxes.limits.freezer import Freezer
from sandboxes.limits.violations import LimitMonitor, LimitViolations
from sandboxes.reclaim.host_resources import LauncherResources
from sandboxes.runtime.control import ControlShell
from sandboxes.runtime.execution import run_collected, running, stream_in, stream_out
from sandboxes.runtime.export import export_tree, reader_command
from sandboxes.runtime.files import SandboxWithFiles
from sandboxes.sessions.bash import ARGV, DESCRIPTORS, ShellSession
from sandboxes.sessions.bash_state import archive_state
from sandboxes.sessions.kernel import KernelPaths
from sandboxes.sessions.python import PROGRAM_INSIDE, KernelSession

SAVE_HINT = "this needs Apptainer without fakeroot, unpacked images, and a kernel and a user that may mount overlays"
PROXY_HINT = "start a new sandbox; the service's log may say why the process of the egress proxies ended"
DRAIN_SECONDS = 3.0
"""`close` waits so long for calls under way to notice the end."""
END_SECONDS = 25.0
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.02
"""Between two looks at what is ending: mostly it has ended at the second."""
SHELL, KERNEL = " ".join(ARGV), f"/{PROGRAM_INSIDE} "
"""The end of a bash session's command line, and a part of a Python session's."""
LOOKS = 10
MAX_LOOKED_AT = 64
"""For `list_running`, which takes the host about 50 us for each process."""
MAX_RUNNING, RUNNING_CHARS = 10, 80
"""Command lines that `list_running` returns, and characters of each: a note for people is to stay short."""


@dataclass(frozen=True, slots=True)
class LaunchedSandbox:
    id: str
    provider: str
    image: str
    control: ControlShell
    resources: LauncherResources
    monitor: LimitMonitor
    kernel_paths: KernelPaths
    workdir: str
    env: Mapping[str, str]
    python: str
    start_timeout: float
    listener: socket.socket | None
    make_snapshot: Callable[[], Snapshot] | None
    """Called while the sandbox runs; None if no snapshot can be made here."""
    save_command: Callable[[int, int], list[str]] | None
    shell_state: bytes
    has_network: Callable[[], bool]
    """Returns whether the network that the sandbox was given is still there."""


class ControlledSandbox(SandboxWithFiles):
    def __init__(self, launched: LaunchedSandbox, spec: SandboxSpec, forget: Callable[[str], None]) -> None:
        """`forget` gets the id once, after the sandbox has been closed."""
        self._launched = launched
        self._spec = spec
        self._forget = forget
        self._env = {**launched.env, **spec.env}
        self._closing = False
        self._closed = anyio.Event()
        self._freezer = Freezer(launched.monitor.group)
        self._lifetime_error: LimitExceededError | None = None
        self._shell = self._make_shell(launched.workdir)
        self._shell.state = launched.shell_state
        self._kernel = self._make_kernel(launched.workdir)
        self._others: list[ShellSession | KernelSession] = []
        self._under_way = 0
        self._at_rest = anyio.Event()
        self._lifetime: asyncio.TimerHandle | None = None
        """At its end everything inside ends. Folders and groups are removed when the sandbox is closed."""
        if spec.lifetime_seconds is not None:
            self._lifetime = asyncio.get_running_loop().call_later(spec.lifetime_seconds, self._expire)
        self._info = SandboxInfo(
            id=launched.id,
            label=spec.label,
            image=launched.image,
            provider=launched.provider,
            started_at=time.time(),
            pid=launched.resources.pid,
        )

    def _make_shell(self, cwd: str) -> ShellSession:
        seen = LimitViolations(self._launched.monitor)
        return ShellSession(
            self._launched.control,
            cwd=cwd,
            env=self._env,
            violations=seen,
            explain=partial(self._explain, seen),
            freezer=self._freezer,
        )

    def _make_kernel(self, cwd: str) -> KernelSession:
        launched, seen = self._launched, LimitViolations(self._launched.monitor)
        return KernelSession(
            launched.control,
            launched.kernel_paths,
            python=launched.python,
            cwd=cwd,
            env=self._env,
            start_timeout=launched.start_timeout,
            violations=seen,
            explain=partial(self._explain, seen),
            freezer=self._freezer,
        )

    @property
    def _sessions(self) -> "list[ShellSession | KernelSession]":
        return [self._shell, self._kernel, *self._others]

    @property
    def info(self) -> SandboxInfo:
        return replace(self._info, state="paused") if self._freezer.frozen else self._info

    @property
    def id(self) -> str:
        return self._launched.id

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    @property
    def workdir(self) -> str:
        return self._launched.workdir

    @property
    def listener(self) -> socket.socket | None:
        return self._launched.listener

    @property
    def running(self) -> bool:
        return not self._closing and self._launched.control.alive and self._launched.has_network()

    @property
    def loss(self) -> SandboxError | None:
        """Why the sandbox has ended, if neither its user nor code inside ended it."""
        if self._closing or self._launched.has_network():
            return None
        return SandboxLostError(f"the proxy of sandbox {self.id} has ended, so it reaches no host", hint=PROXY_HINT)

    @property
    def healthy(self) -> bool:
        return self.running and all(session.healthy for session in self._sessions)

    @property
    def pid(self) -> int | None:
        return self._info.pid

    @property
    def interpreter(self) -> str:
        return self._launched.python

    async def responds(self, seconds: float) -> bool:
        if self._freezer.frozen:
            return self.healthy
        with anyio.move_on_after(seconds), suppress(SandboxError):
            await self._launched.control.wait_until_done()
            return True
        return False

    def resolve(self, path: str) -> str:
        """Return the absolute path inside, without looking at files."""
        return posixpath.normpath(posixpath.join(self.workdir, path))

    async def bash(self) -> ShellSession:
        self._refuse_if_ended()
        if not self._shell.is_open:
            with self._operation():
                await self._shell.ensure_open()
        return self._shell

    async def python(self) -> KernelSession:
        with self._operation():
            await self._kernel.ensure_open()
        return self._kernel

    async def open_session(self, name: SessionName, *, cwd: str | None = None) -> ShellSession | KernelSession:
        make = self._make_shell if name == "bash" else self._make_kernel
        session = make(self.resolve(cwd or "."))
        self._others = [other for other in self._others if not other.is_closed] + [session]
        try:
            with self._operation():
                await session.ensure_open()
        except BaseException:
            await session.close()
            raise
        return session

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
    ) -> ExecResult:
        entries = self._entries(argv, cwd, env)
        if timeout <= 0 or output_limit <= 0:
            raise ValueError("timeout and output_limit must be positive")
        with self._operation():
            return await run_collected(
                self._launched.control,
                argv,
                stdin=stdin,
                cwd=self.resolve(cwd or "."),
                env=entries,
                timeout=timeout,
                output_limit=output_limit,
                violations=LimitViolations(self._launched.monitor),
            )

    @property
    def limits_reached(self) -> tuple[LimitExceededError, ...]:
        return self._launched.monitor.make_errors()

    @asynccontextmanager
    async def program(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> AsyncIterator[RunningProgram]:
        entries = self._entries(argv, cwd, env)
        with self._operation():
            control, folder = self._launched.control, self.resolve(cwd or ".")
            async with running(control, argv, cwd=folder, env=entries) as program:
                yield program

    def _entries(self, argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None) -> Mapping[str, str]:
        """Check a program's strings; return its variables."""
        entries = {**self._env, **(env or {})}
        if not argv or any("\0" in text for text in (*argv, *entries, *entries.values(), cwd or "")):
            raise ValueError("argv must not be empty, and no string may contain NUL characters")
        return entries

    async def list_running(self) -> list[str]:
        first = await self._launched.resources.first_process()
        return [] if first is None else self._as_shown(descendants_of(first.pid, MAX_LOOKED_AT), first.pid)

    def _as_shown(self, pids: Iterable[int], control: int) -> list[str]:
        """Leave out sessions and copies of the control shell."""
        copies, leaders = ("", command_line(control)), children_of(control)
        found: dict[str, None] = {}
        for pid in pids:
            line = command_line(pid)
            job = line.endswith(SHELL)  # of the agent's shell, in a copy of it, if not the shell itself
            if line not in copies and KERNEL not in line and not (job and pid in leaders):
                found["bash" if job else line[:RUNNING_CHARS]] = None
        return list(found)[:MAX_RUNNING]

    async def end_processes(self) -> None:
        with self._operation():
            self._discard_sessions()
            with anyio.move_on_after(END_SECONDS):
                await self._launched.control.end_all()
                for pause in _pauses():
                    if not await self._has_processes_left():
                        return
                    await anyio.sleep(pause)
                    await self._launched.control.end_all()
        raise SandboxClosedError(f"the processes of sandbox {self.id} did not end")

    def _discard_sessions(self) -> None:
        for session in self._sessions:
            session.discard()

    async def _has_processes_left(self) -> bool:
        first = await self._first_process()
        return bool(children_of(first.pid))

    async def _first_process(self) -> FirstProcess:
        first = await self._launched.resources.first_process()
        if first is None:
            raise self._make_ended_error()
        return first

    async def export_path(self, path: str, *, limit: int = DEFAULT_TREE_LIMIT) -> AsyncGenerator[bytes, None]:
        with self._operation():
            async with aclosing(self._export(self.resolve(path), limit)) as parts:
                async for part in parts:
                    yield part

    async def _export(self, path: str, limit: int) -> AsyncGenerator[bytes, None]:
        command = reader_command(path, limit, await self._first_process())
        async with aclosing(export_tree(path, command)) as parts:
            async for part in parts:
                yield part

    async def snapshot(self) -> Snapshot:
        if (make := self._launched.make_snapshot) is None:
            raise SandboxConfigError(
                f"no snapshot of a sandbox of {self._launched.image!r} can be made here",
                hint="this needs Apptainer, unpacked images, a kernel and a user that may mount overlays, and at most "
                "31 snapshots that it was made from in turn",
            )
        await self.end_processes()
        try:
            snapshot = make()
        except (FileNotFoundError, ProcessLookupError) as error:
            raise self._make_ended_error() from error
        except OSError as error:
            raise SandboxError(f"no snapshot can be made: {error}", hint="raise the limit on open files") from error
        await self.close()
        return snapshot

    async def save(self, *, limit: int = DEFAULT_TREE_LIMIT) -> AsyncGenerator[bytes, None]:
        command, launcher = self._launched.save_command, self.pid
        if command is None or launcher is None:
            raise SandboxConfigError(f"no sandbox of {self._launched.image!r} can be saved here", hint=SAVE_HINT)
        with self._operation():
            await self._refuse_running()
            if self._kernel.has_run_code:
                raise SandboxUnsavedError("the Python session has run code")
            if any(session.is_open for session in self._others):
                raise SandboxUnsavedError("it has other sessions")
            state = await self._shell.describe()
            if more := await _wait_for_own_files((await self._first_process()).pid):
                raise SandboxUnsavedError(f"the shell has open files: descriptors {more}")
            yield archive_state(state)
            async with aclosing(export_tree("the sandbox", command(launcher, limit))) as parts:
                async for part in parts:
                    yield part
            await self._refuse_running()  # a look at processes can miss one that was just being started

    async def _refuse_running(self) -> None:
        if running := await self.list_running():
            raise SandboxUnsavedError(f"a program runs in the background: {running[0]}")

    async def pause(self) -> bool:
        self._refuse_if_ended()
        return False if self._spec.listens else await self._freezer.freeze()

    async def reclaim(self) -> int:
        return await self._freezer.reclaim()

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            if self._closing:
                await self._closed.wait()
                return
            self._closing = True
            if self._lifetime is not None:
                self._lifetime.cancel()
            try:
                self._launched.control.close()
                self._freezer.close()
                self._launched.monitor.close()
                await self._launched.resources.release()
                await self._drain()
            finally:
                self._forget(self.id)
                self._closed.set()

    async def _drain(self) -> None:
        """Let calls under way notice the end, then close what they left open."""
        with anyio.move_on_after(DRAIN_SECONDS):
            for session in self._sessions:
                await session.wait_until_idle()
            while self._under_way:
                self._at_rest = anyio.Event()
                await self._at_rest.wait()
        self._discard_sessions()

    def _refuse_if_ended(self) -> None:
        if not self.running:
            raise self._make_ended_error()

    @contextmanager
    def _operation(self) -> Iterator[None]:
        self._refuse_if_ended()
        self._under_way += 1
        try:
            with self._freezer:
                yield
        except SandboxClosedError as error:
            if (known := self._known_end) is not None:
                raise known from error
            raise
        except SandboxStartError as error:
            if not self.running:
                raise self._make_ended_error() from error
            if self._launched.monitor.is_reached("processes"):
                raise self._launched.monitor.make_error("processes") from error
            raise
        finally:
            self._under_way -= 1
            self._at_rest.set()

    def _expire(self) -> None:
        seconds = self._spec.lifetime_seconds or 0.0
        self._lifetime_error = LimitExceededError(
            f"sandbox {self.id} has ended: its lifetime of {seconds:g} s is over", limit="lifetime"
        )
        self._launched.monitor.record("lifetime")
        self._launched.control.close()
        self._freezer.close()

    @property
    def _known_end(self) -> SandboxError | None:
        return self.loss or self._lifetime_error

    def _make_ended_error(self) -> SandboxError:
        if (known := self._known_end) is not None:
            return known
        how = "has been closed" if self._closing else "has ended by itself"
        return SandboxClosedError(f"sandbox {self.id} {how}")

    async def _explain(self, violations: LimitViolations, error: SessionDiedError) -> SandboxError:
        if not self.running:
            return self._make_ended_error()
        for violation in violations.drain():
            if violation.limit in {"memory", "watches"}:
                violation.output = error.output
                return violation
        return error

    async def _stream(self, argv: Sequence[str], limit: int | None) -> AsyncGenerator[bytes, None]:
        with self._operation():
            stream = stream_out(self._launched.control, argv, env=self._env, limit=limit)
            async with aclosing(stream):
                async for part in stream:
                    yield part

    async def _feed(self, argv: Sequence[str], data: AsyncIterable[bytes]) -> int:
        with self._operation():
            return await stream_in(self._launched.control, argv, data, env=self._env)


async def _wait_for_own_files(control: int) -> list[int]:
    """Return descriptors besides the shell's own, once it has reported its last command."""
    for pause in islice(_pauses(), LOOKS):
        if not (found := _open_files_of_shell(control)):
            break
        await anyio.sleep(pause)
    return found


def _pauses() -> Iterator[float]:
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE)


def _open_files_of_shell(control: int) -> list[int]:
    shells = [pid for pid in children_of(control) if command_line(pid).endswith(SHELL)]
    found = {int(path.name) for pid in shells for path in Path(f"/proc/{pid}/fd").iterdir()}
    return sorted(found - DESCRIPTORS)

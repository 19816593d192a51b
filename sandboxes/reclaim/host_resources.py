"""Processes, folders and control groups that a service and its sandboxes have on this host, and how they end.

A service has a guard and a locked folder; a sandbox has a launcher, a folder inside that, and control groups. The
folder is created first and removed last, so anything left on the host has one; see `reaper`.
"""

import time
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from sandboxes.errors import SandboxClosedError
from sandboxes.host.children import ChildProcess, LingeringChildren, end_process, wait_exit
from sandboxes.host.processes import FirstProcess, find_first_process, kill_processes
from sandboxes.host.uid_leases import UserLease
from sandboxes.limits.cgroups import ControlGroup, ControlGroups, remove_groups
from sandboxes.reclaim import reaper
from sandboxes.reclaim.guard import Guard
from sandboxes.reclaim.rmtree import remove_tree
from sandboxes.reclaim.run_folders import RunFolder, ServiceFolder, remember, run_base, run_bases

log = structlog.get_logger(__name__)

EXIT_GRACE = 2.0
KILL_WAIT = 4.0
COLLECT_SECONDS = 2.0
"""The wait for a launcher once its control groups have been killed too."""
GROUP_SECONDS = 2.0
REMOVE_SECONDS = 30.0
CLOSE_SECONDS = 5.0


class ServiceResources:
    """The folder and the guard of one service, created when its first sandbox starts."""

    def __init__(self, state_dir: Path, run_dir: Path | None) -> None:
        self._state_dir = state_dir
        self._run_dir = run_dir
        self._lock = anyio.Lock(fast_acquire=True)
        self._held: list[tuple[ServiceFolder, list[str]]] = []
        self._guards: list[Guard] = []
        self._closed = False

    async def new_folder(self, groups: ControlGroups) -> RunFolder:
        """Return a folder that is not created yet; from now on a guard runs.

        Raises:
            OSError: The folder or the guard cannot be created.
            SandboxClosedError: The service has been closed.
            SandboxConfigError: The host has no place for the folder.
        """
        async with self._lock:
            if self._closed:  # while this waited
                raise SandboxClosedError("the provider has been closed")
            if not (self._held and self._held[-1][0].intact and self._guards[-1].alive):
                await anyio.to_thread.run_sync(self._watch, groups)
            return self._held[-1][0].new()

    def _watch(self, groups: ControlGroups) -> None:
        """Make a folder if there is none in its place, and start a guard if none lives."""
        if not self._held or not self._held[-1][0].intact:
            base = run_base(self._run_dir)
            remember(self._state_dir, base)
            folder = ServiceFolder(base)
            prefixes = sorted({str(path) for path in groups.paths_of(folder.name).values()})
            folder.describe(prefixes)
            self._held.append((folder, prefixes))
        folder, prefixes = self._held[-1]
        guards = [*self._guards, Guard(folder.path, prefixes)]
        self._guards = [guard for guard in guards if guard.alive]
        for dead in guards:
            if dead not in self._guards:
                dead.dismiss(clean=True)

    @property
    def guards(self) -> list[int]:
        """Pids: one, unless a folder was removed under it."""
        return [guard.process.pid for guard in self._guards if guard.alive]

    async def sweep(self, groups: ControlGroups) -> reaper.SweepReport:
        """Reclaim the remains of this user's dead services.

        Raises:
            SandboxConfigError: The host has no place for the folder of this service: told now, not at each start.
        """
        parents = sorted({str(path.parent) for path in groups.paths_of("").values()})

        def sweep_all() -> reaper.SweepReport:
            run_base(self._run_dir)
            return sum(
                (reaper.sweep(base, parents) for base in run_bases(self._run_dir, self._state_dir)),
                reaper.SweepReport(),
            )

        return await anyio.to_thread.run_sync(sweep_all)

    async def close(self) -> None:
        """Remove the remains of closed sandboxes, then the folder. Idempotent; if it fails, the guard goes on."""
        async with self._lock:
            self._closed = True
            await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        held, self._held = self._held, []
        guards, self._guards = self._guards, []
        left = [reaper.reclaim(folder.path, groups, CLOSE_SECONDS, rounds=1).failures for folder, groups in held]
        for folder, _ in held:
            folder.close()
        for failure in (failure for failures in left for failure in failures):
            log.error(
                "something of this service could not be removed",
                what=failure,
                hint="its guard goes on, and the next start tries again; see docs/explanation/sandbox-reclaim.md",
            )
        for guard in guards:
            guard.dismiss(clean=not any(left))


class LeftoverProcesses:
    """Ends processes of sandboxes by their mark. Finding them lists all of /proc, so concurrent closes share a pass."""

    def __init__(self) -> None:
        self._lock = anyio.Lock(fast_acquire=True)
        self._waiting: set[str] = set()

    async def end(self, sandbox_id: str) -> None:
        batch = self._waiting
        batch.add(sandbox_id)
        async with self._lock:
            if batch is self._waiting:  # else another close has done it with its own
                self._waiting = set()
                await anyio.to_thread.run_sync(kill_processes, batch.__contains__)


class LauncherResources:
    def __init__(
        self,
        folder: RunFolder,
        group: ControlGroup | None,
        leftovers: LeftoverProcesses,
        lingering: LingeringChildren,
    ) -> None:
        """`lingering` keeps a launcher that outlives its release."""
        self._folder = folder
        self._group = group
        self._leftovers = leftovers
        self._lingering = lingering
        self.process: ChildProcess | None = None
        self.lease: UserLease | None = None
        self.keeps_files = False
        """A snapshot of the sandbox owns the folder now."""
        self.before_release = AsyncExitStack()
        """Parts that must end before the launcher is waited for."""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    async def first_process(self) -> FirstProcess | None:
        """Return the control shell; None if it has ended."""
        return find_first_process(self.process.pid) if self.process and self.process.poll() is None else None

    async def watched_group(self) -> ControlGroup | None:
        """Return the groups whose counters tell which limits the sandbox reaches, once it is ready."""
        return self._group

    async def release(self) -> None:
        """End the processes, then remove the folder. If that fails, the service's close tries again.

        A launcher that is still alive keeps the folder and its user id until it has been collected.
        """
        try:
            await self.before_release.aclose()
        finally:
            await self._release_processes()

    async def _release_processes(self) -> None:
        if self.process is not None:
            await end_process(self.process, grace=EXIT_GRACE, kill_wait=KILL_WAIT)
        if self._group is None and self.process is not None:
            await self._leftovers.end(self._folder.id)
        await anyio.to_thread.run_sync(reaper.kill_groups, self._paths)
        if self.process is None or await wait_exit(self.process, COLLECT_SECONDS):
            await anyio.to_thread.run_sync(self._remove)
        else:
            self._lingering.keep(self.process, self._remove)
        await self._lingering.collect()

    @property
    def _paths(self) -> list[Path]:
        return self._group.paths if self._group else []

    def _remove(self) -> None:
        """Call it after the launcher has been collected."""
        paths = self._paths
        reaper.kill_groups(paths)
        if remove_groups(paths, GROUP_SECONDS):
            if self.lease is not None:
                self.lease.release()
            if self.keeps_files:
                return
            remove_tree(self._folder.path, time.monotonic() + REMOVE_SECONDS)

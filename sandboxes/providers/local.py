"""Sandboxes that are plain processes of this user, for tests and trusted code only.

They isolate NOTHING: code inside can do whatever this user can. Limits on memory, processes, disk and processor time
are not enforced, nor is `network`. Images are not used. These do hold: the contract's sessions, timeouts and output
limits, a clean environment, and a private working folder that is removed with the sandbox.
"""

import os
import posixpath
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio.to_thread
import structlog

from sandboxes.config import LocalConfig
from sandboxes.contract import SandboxSpec
from sandboxes.errors import SandboxConfigError
from sandboxes.host.processes import kill_processes, processes_of
from sandboxes.limits.cgroups import ResourceLimits
from sandboxes.providers.base import HostProvider, LaunchPlan
from sandboxes.providers.sandbox import ControlledSandbox, LaunchedSandbox
from sandboxes.reclaim.run_folders import RunFolder
from sandboxes.runtime.control import SCRIPT
from sandboxes.runtime.export import export_tree, reader_command

KNOWN_FAILURES = {
    "hidden_host": "code runs as this user and sees all of the host's files and processes",
    "hidden_network": "code has the host's network",
    "hidden_neighbors": "sandboxes are processes of one user, which can signal each other",
    "control_out_of_reach": "the control shell is a process of the same user",
    "no_rights": "code has all rights of this user",
}

log = structlog.get_logger(__name__)


class LocalProvider(HostProvider):
    name = "local"
    isolates = False
    known_failures = KNOWN_FAILURES

    def __init__(self, config: LocalConfig, state_dir: Path) -> None:
        super().__init__(state_dir, config.run_dir, config.start_timeout)
        self._python = str(config.python or sys.executable)
        log.warning("sandboxes are not isolated", provider=self.name, use="for tests and trusted code alone")

    async def plan(self, spec: SandboxSpec, folder: RunFolder) -> LaunchPlan:
        if spec.read_only_binds:
            raise SandboxConfigError("the local provider cannot bind host paths", hint="use the apptainer provider")
        workdir = str(folder.overlay)
        return LaunchPlan(
            argv=["bash", "--norc", str(folder.pipes / SCRIPT.name), str(folder.pipes), workdir, "0", "0"],
            env={name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ},
            image="",
            limits=ResourceLimits(None, None, None),
            user=os.geteuid(),
            group=os.getegid(),
            pipes_inside=str(folder.pipes),
            sockets_inside=str(folder.sockets),
            workdir=workdir,
            session_env={"HOME": workdir, "TERM": "dumb", "LANG": "C.UTF-8"},
            python=self._python,
            listens="host" if spec.listens else None,
        )

    def make_sandbox(self, launched: LaunchedSandbox, spec: SandboxSpec) -> ControlledSandbox:
        return LocalSandbox(launched, spec, self.forget)


class LocalSandbox(ControlledSandbox):
    """Maps paths below `spec.workdir` to the working folder in file operations."""

    def resolve(self, path: str) -> str:
        given = posixpath.normpath(posixpath.join(self.workdir, path))
        named = posixpath.normpath(self.spec.workdir)
        if given == named or given.startswith(f"{named}/"):
            return posixpath.normpath(posixpath.join(self.workdir, posixpath.relpath(given, named)))
        return given

    async def list_running(self) -> list[str]:
        pids = await anyio.to_thread.run_sync(processes_of, {self.id})
        return self._as_shown(pids, self.info.pid or 0)

    async def _has_processes_left(self) -> bool:
        """End processes that left the control shell's session, found by the mark they inherited.

        A process that removed the mark is not found.
        """
        control = self.info.pid
        ended = await anyio.to_thread.run_sync(kill_processes, frozenset({self.id}).__contains__, control)
        return ended > 0

    def _export(self, path: str, limit: int) -> AsyncGenerator[bytes, None]:
        return export_tree(path, reader_command(path, limit))

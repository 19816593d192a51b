"""Sandboxes of a server that speaks E2B's API: E2B's cloud, AgentENV, OpenSandbox and others.

The server isolates, and how well is its own affair: E2B's are small virtual machines. Processes, memory and disk are
limited by the template, and nothing here sees when such a limit is reached. `network = "none"` asks the server to
refuse all traffic; lists of hosts, read-only binds and snapshots are refused.

The service's end of each sandbox is a folder with pipes and sockets, joined with the inside by a relay (`link`). The
relay runs as root where the server allows it, and code as an ordinary user without any rights. That all processes have
ended, and what a tree of files has, is the relay's word. Code that is root can make it lie, so let a grader that
matters run in a fresh sandbox.

A sandbox ends with its task, a time after its last renewal in any case, and at the next start of the service on this
host with the same state folder, which finds it by its metadata.
"""

import asyncio
import hashlib
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxes.config import E2BConfig
from sandboxes.contract import DEFAULT_WORKDIR, SandboxSpec, SweepReport
from sandboxes.errors import (
    ProviderUnavailableError,
    SandboxClosedError,
    SandboxConfigError,
    SandboxError,
    SandboxStartError,
)
from sandboxes.extras import extra_hint
from sandboxes.host.children import LingeringChildren
from sandboxes.limits.cgroups import ResourceLimits
from sandboxes.providers.base import HostProvider, LaunchPlan
from sandboxes.providers.e2b import relay_program
from sandboxes.providers.e2b.link import CONTROL_SHELL, PROGRAM, TRUSTED, Link
from sandboxes.providers.sandbox import ControlledSandbox, LaunchedSandbox
from sandboxes.reclaim.host_resources import LauncherResources, LeftoverProcesses
from sandboxes.reclaim.reaper import NAME, is_dead
from sandboxes.reclaim.run_folders import RunFolder, run_bases
from sandboxes.runtime import export, tree_reader
from sandboxes.runtime.control import ControlShell
from sandboxes.runtime.execution import ProgramFailedError, stream_out

try:
    from sandboxes.providers.e2b.remote import FOLDER, OWNER, SANDBOX, Client, Remote
except ModuleNotFoundError as missing:
    if missing.name != "e2b":
        raise
    raise ProviderUnavailableError("the package e2b is not installed", hint=f"{extra_hint('e2b')}.") from missing

OWNER_FILE = "e2b-owner"
RELEASE_SECONDS = 5.0
"""`close` waits so long for the server; then the client goes on alone."""
READER = export.SCRIPT.read_text()
END_BYTES = tree_reader.END_BLOCKS * tree_reader.BLOCK
# Run from a link of another name: what the relay is made of is nothing that code inside needs to know.
START = 'at=$(mktemp -d) && ln -s "$(command -v python3)" "$at/relay" && exec "$at/relay" -I -S -c "$@"'
SEEN = "a sandbox may see an interface, whose traffic the server refuses"
KNOWN_FAILURES = {"hidden_network": SEEN, "reachable_owner": SEEN}
FREE = "code is root in its own machine, and may change whatever runs there"
FAILURES_AS_ROOT = {"control_out_of_reach": FREE, "exported_without_programs": FREE, "no_rights": FREE}


class RemoteResources(LauncherResources):
    def __init__(
        self, folder: RunFolder, leftovers: LeftoverProcesses, lingering: LingeringChildren, remote: Remote
    ) -> None:
        super().__init__(folder, None, leftovers, lingering)
        self._remote = remote

    async def release(self) -> None:
        if self._remote.task is None:
            self._remote.link.close()
        else:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([asyncio.wrap_future(self._remote.task)], timeout=RELEASE_SECONDS)
        await super().release()


class E2BSandbox(ControlledSandbox):
    def __init__(
        self, launched: LaunchedSandbox, spec: SandboxSpec, forget: Callable[[str], None], remote: Remote
    ) -> None:
        super().__init__(launched, spec, forget)
        self._remote = remote

    @property
    def loss(self) -> SandboxError | None:
        return self._remote.failure

    async def _has_processes_left(self) -> bool:
        return await asyncio.wrap_future(self._remote.link.end_processes())

    async def _export(self, path: str, limit: int) -> AsyncGenerator[bytes, None]:
        program = ["python3", "-I", "-S", "-c", READER, path, str(limit)]
        most = 2 * limit + END_BYTES  # of an honest reader
        stream = stream_out(self._launched.control, program, env={}, limit=most, mode=TRUSTED)
        try:
            async with aclosing(stream):
                async for part in stream:
                    yield part
        except ProgramFailedError as error:
            export.raise_for_exit(path, error.exit_code, error.said)


class E2BProvider(HostProvider):
    name = "e2b"
    isolates = True

    def __init__(self, config: E2BConfig, state_dir: Path) -> None:
        """
        Raises:
            ProviderUnavailableError: There is no API key.
        """
        super().__init__(state_dir, config.run_dir, config.start_timeout)
        self._config = config
        self._client = Client(config)
        self._state_dir = state_dir
        self._owner_file = state_dir / OWNER_FILE

    @property
    def known_failures(self) -> Mapping[str, str]:
        return KNOWN_FAILURES | (FAILURES_AS_ROOT if self._config.user == "root" else {})

    @property
    def used_seconds(self) -> float:
        return self._client.seconds

    async def plan(self, spec: SandboxSpec, folder: RunFolder) -> LaunchPlan:
        refused = {
            "read-only binds of this host": spec.read_only_binds,
            "lists of hosts": isinstance(spec.network, tuple),
            "snapshots": spec.snapshot,
            "saved files": spec.saved,
        }
        for what, wanted in refused.items():
            if wanted:
                raise SandboxConfigError(f"the e2b provider has no {what}", hint="use the apptainer provider")
        return LaunchPlan(
            argv=[],
            env={},
            image=spec.image or self._config.template,
            limits=ResourceLimits(None, None, None),
            user=os.geteuid(),
            group=os.getegid(),
            pipes_inside=f"{_inside(folder)}/pipes",
            sockets_inside=f"{_inside(folder)}/sockets",
            workdir=spec.workdir or DEFAULT_WORKDIR,
            session_env={"TERM": "dumb", "LANG": "C.UTF-8"},
            python=self._config.python,
            listens="host" if spec.listens else None,
        )

    async def start(self, spec: SandboxSpec) -> E2BSandbox:
        if self._closed:
            raise SandboxClosedError("the provider has been closed")
        try:
            folder = await self._service_resources.new_folder(self.groups())
            owner = await anyio.to_thread.run_sync(self._read_owner)
            plan = await self.plan(spec, folder)
            ours, theirs = socket.socketpair()
            control, link = ControlShell(ours, folder.pipes), Link(folder, theirs, _inside(folder))
        except OSError as error:
            raise SandboxStartError(f"no folder for the sandbox could be made: {error}") from error
        remote = Remote(
            client=self._client,
            link=link,
            folder=folder,
            metadata={OWNER: owner, FOLDER: folder.path.parent.name, SANDBOX: folder.id},
            template=plan.image,
            network=spec.network == "full",
            until=time.monotonic() + self._start_timeout,
        )
        resources = RemoteResources(folder, self._leftovers, self.lingering_children, remote)
        try:
            folder.create(plan.user, plan.group)
            listener = await self._open_sockets(plan, folder, resources, None)
            link.owner = listener.getsockname()[1] if listener is not None else 0
            sizes = str(len(PROGRAM)), str(len(CONTROL_SHELL))
            arguments = [*sizes, _inside(folder), plan.workdir, self._config.user, str(link.owner)]
            command = ["bash", "-c", START, "relay", relay_program.BOOT, *arguments]
            await anyio.to_thread.run_sync(remote.start, command)
            await self._wait_until_ready(control, folder)
            plan.session_env["HOME"] = link.home
            launched = self._make_launched(plan, folder, control, resources, None, listener)
            sandbox = E2BSandbox(launched, replace(spec, workdir=plan.workdir), self.forget, remote)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                control.close()
                await resources.release()
            if remote.failure is not None and isinstance(error, SandboxError):
                raise remote.failure from error
            if isinstance(error, OSError):
                raise SandboxStartError(f"cannot launch the sandbox: {error}") from error
            raise
        self._live[folder.id] = sandbox
        return sandbox

    def _read_owner(self) -> str:
        """Return an id that services of this host with the same state folder share, and no others."""
        with suppress(FileNotFoundError):
            text = f"{socket.gethostname()}/{self._owner_file.read_text()}"
            return hashlib.sha256(text.encode()).hexdigest()[:32]
        self._owner_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self._owner_file.with_name(f".{OWNER_FILE}.{secrets.token_hex(8)}")
        draft.write_text(secrets.token_hex(16))
        with suppress(FileExistsError):  # another service was faster
            os.link(draft, self._owner_file)
        draft.unlink()
        return self._read_owner()

    def _is_dead(self, name: str) -> bool:
        """Return whether a service of this host with the same state folder has ended."""
        bases = run_bases(self._config.run_dir, self._state_dir)
        return NAME.fullmatch(name) is not None and all(is_dead(base / name) for base in bases)

    async def sweep(self) -> SweepReport:
        """Kill sandboxes of dead services on the server, too."""
        found = await super().sweep()
        try:
            owner = await anyio.to_thread.run_sync(self._read_owner)
            work = self._client.start(self._client.sweep, owner, self._is_dead)
            killed, failures = await asyncio.wrap_future(work)
        except OSError as error:
            killed, failures = 0, (str(error),)
        return SweepReport(killed, found.processes, (*found.failures, *failures))

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            await super().close()
            await anyio.to_thread.run_sync(self._client.close)


def _inside(folder: RunFolder) -> str:
    return f"/tmp/rollout-{folder.id}"  # noqa: S108

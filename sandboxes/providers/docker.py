"""Sandboxes in Docker: one container each, whose process 1 is the control shell.

A container has its own processes, mounts and IPC, a network with only a loopback, Docker's system call filter, no
capabilities or way to gain any, and no socket of the daemon. The image is read-only; where code, an ordinary user, may
write there are memory file systems, each within the disk limit and together within the memory limit. The folder of the
kernels' sockets alone is the host's, without a limit. It shares the kernel, and the user ids unless the daemon remaps
them.

The container lives as long as its `docker run`, whose standard input belongs to the service. When that closes, even by
the service's death, process 1 ends and the daemon removes the container. Containers left anyway carry labels with the
sandbox's id and its service's folder; `sweep` removes those whose service is dead.

The working folder is a memory file system too, and hides the image's content there.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxes.config import DockerConfig
from sandboxes.contract import DEFAULT_WORKDIR, Bind, SandboxSpec, SweepReport
from sandboxes.errors import (
    ImageNotFoundError,
    ProviderUnavailableError,
    SandboxClosedError,
    SandboxConfigError,
    SandboxError,
    SandboxLostError,
)
from sandboxes.host.children import LingeringChildren
from sandboxes.host.processes import MARKER, FirstProcess, processes_of
from sandboxes.host.subordinate_ids import resolve_user
from sandboxes.images.sources import packaged_names
from sandboxes.limits.cgroups import CGROUPS, ControlGroup, ResourceLimits
from sandboxes.providers.base import HIDE, PIPES, SOCKETS, HostProvider, LaunchPlan
from sandboxes.providers.sandbox import ControlledSandbox, LaunchedSandbox
from sandboxes.reclaim.host_resources import LauncherResources, LeftoverProcesses
from sandboxes.reclaim.reaper import is_dead
from sandboxes.reclaim.run_folders import RunFolder
from sandboxes.runtime.control import ANSWERS, SCRIPT
from sandboxes.runtime.export import export_tree, reader_command

HINT = "start the daemon, name one in DOCKER_HOST or sandbox.host, or install it with scripts/install-docker"
REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
NO_IMAGE = ("No such image", "No such object")
ENDED_BY_ITSELF = (0, 1)
"""Exit codes of a control shell whose input closed; others may leave a container."""
OVERHEAD_PROCESSES = 16
"""The control shell's own, on top of the limit."""
OWN_IMAGES = "rollout-service"
"""The repository prefix that `scripts/docker-image` gives images of this package."""
SHM_BYTES = 64 * 1024 * 1024
KNOWN_FAILURES = {"reachable_owner": "the daemon makes the container's network, and hands no socket of it out"}
INSIDE = FirstProcess(1, 0)
"""As a container that joins the process namespace sees it."""
ASK_SECONDS = 30.0
LIMITS = {"MemoryLimit": "memory", "PidsLimit": "processes", "CPUCfsQuota": "cpus", "CpuCfsQuota": "cpus"}
"""The limits that a daemon can hold, by their names in what it says of itself."""
CONTROLLERS = {"memory": "memory", "pids": "processes", "cpu": "cpus"}
"""The same in the words of Podman, which names control groups."""
NEEDED = {"memory", "processes"}
NO_LIMITS_HINT = "run the daemon as root, or let systemd delegate the controllers memory and pids to its user"


class Containers:
    SANDBOX = "rollout-service.sandbox"
    SERVICE = "rollout-service.folder"
    """The label with the folder that a container's service locks while it lives (see `reaper`)."""

    def __init__(self, binary: str, env: Mapping[str, str]) -> None:
        self._binary = binary
        self.env = dict(env)

    async def ask(self, *arguments: str) -> tuple[int, str]:
        """Return exit code and output. A client that hangs is killed."""
        alone = anyio.CapacityLimiter(1)  # if the daemon hangs, the threads that others share stay free
        return await anyio.to_thread.run_sync(self._ask, arguments, limiter=alone)

    def _ask(self, arguments: tuple[str, ...]) -> tuple[int, str]:
        try:
            done = subprocess.run(
                [self._binary, *arguments],
                env=self.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ASK_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return 1, str(error)
        said = done.stdout if done.returncode == 0 else done.stderr
        return done.returncode, said.decode("utf-8", errors="replace")

    async def find_limits(self) -> frozenset[str]:
        """
        Raises:
            ProviderUnavailableError: The daemon does not answer, or would run containers without limits.
        """
        code, said = await self.ask("info", "--format", "{{json .}}")
        if code != 0:
            raise ProviderUnavailableError(f"{self._binary} does not answer: {said.strip()}", hint=HINT)
        found = _limits_in(said)
        if missing := NEEDED - found:
            raise ProviderUnavailableError(
                f"{self._binary} holds no limit on {' and '.join(sorted(missing))}", hint=NO_LIMITS_HINT
            )
        return found

    async def remove_sandbox(self, sandbox_id: str) -> None:
        """Remove its containers; if that fails, the next sweep tries again."""
        with suppress(SandboxLostError):
            for container, _ in await self._labeled(f"{self.SANDBOX}={sandbox_id}", "--all"):
                await self.ask("rm", "--force", "--volumes", container)

    async def count_processes(self, sandbox_id: str) -> int:
        """
        Raises:
            SandboxClosedError: The container has ended.
            SandboxLostError: The daemon does not answer.
        """
        code, said = await self.ask("top", await self._container(sandbox_id), "-o", "pid")
        if code != 0:
            await self._container(sandbox_id)
            raise SandboxLostError(f"{self._binary} lists no processes of sandbox {sandbox_id}: {said.strip()}")
        return len(said.split()) - 1  # without the heading

    async def make_reader(self, sandbox_id: str, image: str, command: Sequence[str]) -> list[str]:
        """Run the file reader in a second container, which sees the sandbox's processes, and its files through them.

        It has no network, and no rights except to read and inspect. The reader's script is bound from the host.

        Raises:
            SandboxClosedError: The sandbox's container has ended.
            SandboxLostError: The daemon does not answer.
        """
        _, *flags, script, path, limit, pid, parent = command
        return [
            *(self._binary, "run", "--rm", "--pull", "never", "--log-driver", "none", "--network", "none"),
            *("--pid", f"container:{await self._container(sandbox_id)}", "--user", "0:0", "--read-only"),
            *("--cap-drop", "ALL", "--cap-add", "SYS_PTRACE", "--cap-add", "DAC_READ_SEARCH"),
            *("--security-opt", "no-new-privileges", "--workdir", "/", "--entrypoint", "python3"),
            *("--mount", f"type=bind,source={script},target=/tree_reader.py,readonly", image),
            *(*flags, "/tree_reader.py", path, limit, pid, parent),
        ]

    async def _container(self, sandbox_id: str) -> str:
        found = await self._labeled(f"{self.SANDBOX}={sandbox_id}")
        if not found:
            raise SandboxClosedError(f"the container of sandbox {sandbox_id} has ended")
        return found[0][0]

    async def sweep(self) -> tuple[int, tuple[str, ...]]:
        """Return how many containers of dead services were removed, and why others were not."""
        removed, failures = 0, []
        try:
            for container, folder in await self._labeled(self.SERVICE, "--all"):
                if await anyio.to_thread.run_sync(is_dead, Path(folder)):
                    code, said = await self.ask("rm", "--force", "--volumes", container)
                    removed += code == 0
                    if code != 0 and "No such container" not in said:
                        failures.append(f"container {container}: {said.strip()}")
        except SandboxLostError as error:
            failures.append(str(error))
        return removed, tuple(failures)

    async def _labeled(self, label: str, *which: str) -> list[tuple[str, str]]:
        """Return the containers that run, or `--all`, each with its service's folder.

        Raises:
            SandboxLostError: The daemon does not answer. That says nothing about the containers.
        """
        shown = '{{.ID}} {{.Label "' + self.SERVICE + '"}}'
        code, said = await self.ask("ps", *which, "--no-trunc", "--filter", f"label={label}", "--format", shown)
        if code != 0:
            raise SandboxLostError(f"{self._binary} does not answer: {said.strip()}", hint=HINT)
        return [(container, folder) for container, _, folder in (line.partition(" ") for line in said.splitlines())]


def _limits_in(said: str) -> frozenset[str]:
    """Return the limits that Docker or Podman says it holds; none if it says something else."""
    try:
        info = json.loads(said)
        controllers = info.get("host", {}).get("cgroupControllers") or ()
    except (ValueError, AttributeError):
        return frozenset()
    named = [limit for name, limit in LIMITS.items() if info.get(name)]
    return frozenset([*named, *(CONTROLLERS[name] for name in controllers if name in CONTROLLERS)])


def container_group(sandbox_id: str) -> ControlGroup | None:
    """Return None if the container's process is not visible on this host.

    Reads all of /proc: call it in a thread.
    """
    ours = _memory_folder("self")
    folders = (_memory_folder(str(pid)) for pid in processes_of({sandbox_id}))
    # Skip our own group: the client that started the container has the mark too.
    found = next((folder for folder in folders if folder is not None and folder != ours), None)
    return ControlGroup({"memory": found}) if found is not None else None


def _memory_folder(pid: str) -> Path | None:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                folder = CGROUPS / ("memory" if controllers else "") / path.lstrip("/")
                if (folder / ("memory.oom_control" if controllers else "memory.events")).exists():
                    return folder
    return None


class ContainerResources(LauncherResources):
    """Removes the container if its `docker run` did not see it end."""

    def __init__(
        self,
        folder: RunFolder,
        group: ControlGroup | None,
        leftovers: LeftoverProcesses,
        lingering: LingeringChildren,
        containers: Containers,
    ) -> None:
        super().__init__(folder, group, leftovers, lingering)
        self._containers = containers
        self._id = folder.id

    async def watched_group(self) -> ControlGroup | None:
        return await anyio.to_thread.run_sync(container_group, self._id)

    async def release(self) -> None:
        await super().release()
        if self.process is not None and self.process.poll() not in ENDED_BY_ITSELF:
            await self._containers.remove_sandbox(self._id)


class DockerSandbox(ControlledSandbox):
    """Asks the daemon, since a service that is not root may not look into containers."""

    def __init__(
        self,
        launched: LaunchedSandbox,
        spec: SandboxSpec,
        forget: Callable[[str], None],
        containers: Containers,
        image: str,
    ) -> None:
        """`image` must have Python: the container that reads files from this one uses it."""
        super().__init__(launched, spec, forget)
        self._containers = containers
        self._image = image

    @property
    def loss(self) -> SandboxError | None:
        """Nothing inside can end process 1, except by using up the memory."""
        control, monitor = self._launched.control, self._launched.monitor
        if self._closing or control.alive or control.was_closed or monitor.read_counts().get("memory"):
            return None
        said = f"the container of sandbox {self.id}, its client or its daemon was ended from outside"
        return SandboxLostError(said, hint="look at the daemon's log, and at the host's memory")

    async def _has_processes_left(self) -> bool:
        return await self._containers.count_processes(self.id) > 1

    async def _export(self, path: str, limit: int) -> AsyncGenerator[bytes, None]:
        command = await self._containers.make_reader(self.id, self._image, reader_command(path, limit, INSIDE))
        async with aclosing(export_tree(path, command, self._containers.env)) as parts:
            async for part in parts:
                yield part


class DockerProvider(HostProvider):
    name = "docker"
    isolates = True
    known_failures = KNOWN_FAILURES

    def __init__(self, config: DockerConfig, state_dir: Path) -> None:
        """
        Raises:
            ProviderUnavailableError: The command is not installed.
            SandboxConfigError: The configured user does not exist, or is root.
        """
        super().__init__(state_dir, config.run_dir, config.start_timeout)
        binary = shutil.which(config.binary)
        if binary is None:
            raise ProviderUnavailableError(f"command {config.binary!r} not found", hint=HINT)
        self._config = config
        self._user, self._group = resolve_user(config.user)
        self._binary = binary
        self._env = _client_env(config.host)
        self._containers = Containers(binary, self._env)
        self._held: frozenset[str] | None = None

    @property
    def enforced(self) -> frozenset[str]:
        """The limits that hold, as the daemon said at a sweep or at the first start; before that, only the disk's."""
        return frozenset({"disk"}) | (self._held or frozenset())

    async def _find_held(self) -> frozenset[str]:
        """
        Raises:
            ProviderUnavailableError: The daemon does not answer, or would run containers without limits.
        """
        if self._held is None:
            self._held = await self._containers.find_limits()
        return self._held

    def make_resources(self, folder: RunFolder, group: ControlGroup | None) -> LauncherResources:
        return ContainerResources(folder, group, self._leftovers, self.lingering_children, self._containers)

    def make_sandbox(self, launched: LaunchedSandbox, spec: SandboxSpec) -> DockerSandbox:
        reader = self._resolve_name(self._config.image)
        return DockerSandbox(launched, spec, self.forget, self._containers, reader)

    async def identity(self, spec: SandboxSpec) -> str:
        return await self._image_id(spec.image or self._config.image)

    async def _image_id(self, name: str) -> str:
        """Return the id that the name refers to now.

        Raises:
            ImageNotFoundError: The daemon does not have the image; it is never pulled here.
            ProviderUnavailableError: The daemon does not answer.
            SandboxConfigError: The name is not a valid image reference.
        """
        if not REFERENCE.fullmatch(name):
            raise SandboxConfigError(
                f"{name!r} is not a valid image reference",
                hint="name it as `docker images` does; scripts/docker-image imports the service's own images",
            )
        name = self._resolve_name(name)
        code, said = await self._containers.ask("image", "inspect", "--format", "{{.Id}}", name)
        if code == 0:
            return said.strip()
        if any(text in said for text in NO_IMAGE):
            raise ImageNotFoundError(
                f"{self._config.binary} has no image {name!r}",
                hint=f"run {self._config.binary} pull {name}; scripts/docker-image imports the service's own images",
            )
        raise ProviderUnavailableError(f"{self._config.binary} does not answer: {said.strip()}", hint=HINT)

    def _resolve_name(self, name: str) -> str:
        return f"{OWN_IMAGES}/{name}" if name in packaged_names() else name.removeprefix("docker://")

    async def plan(self, spec: SandboxSpec, folder: RunFolder) -> LaunchPlan:
        name = spec.image or self._config.image
        image, held = await self._image_id(name), await self._find_held()
        memory = spec.memory_bytes or self._config.limits.memory_bytes
        # Never the image's own: a memory file system covers it, and the image's files below it.
        workdir = spec.workdir or DEFAULT_WORKDIR
        command = [
            *(self._binary, "run", "--rm", "--interactive", "--pull", "never", "--log-driver", "none"),
            *self._isolation_flags(spec),
            *self._limit_flags(spec, memory, held),
            *self._mount_flags(spec, folder),
            *("--label", f"{Containers.SANDBOX}={folder.id}"),
            *("--label", f"{Containers.SERVICE}={folder.path.parent}"),
            *("--env", f"{MARKER}={folder.id}", "--workdir", "/", "--entrypoint", "/bin/bash", image),
            *("--norc", "-c", HIDE, "hide", f"{PIPES}/{SCRIPT.name}", PIPES, workdir, "0", "0", ANSWERS),
        ]
        return LaunchPlan(
            argv=command,
            env=self._env,
            image=name,
            limits=ResourceLimits(memory, None, None),  # the daemon enforces them
            user=self._user,
            group=self._group,
            pipes_inside=PIPES,
            sockets_inside=SOCKETS,
            workdir=workdir,
            session_env={"HOME": "/root", "TERM": "dumb", "LANG": "C.UTF-8"},
            answers=True,
            listens="host" if spec.listens else None,
        )

    def _isolation_flags(self, spec: SandboxSpec) -> list[str]:
        if spec.network not in {"none", "full"}:
            raise SandboxConfigError(
                "the docker provider cannot restrict the network to a list of hosts",
                hint='use "none", or the apptainer provider',
            )
        if spec.listens and spec.network == "none":
            raise SandboxConfigError(
                "the docker provider cannot listen inside a sandbox without a network",
                hint='use the network "full", or the apptainer provider',
            )
        return [
            *("--network", "none" if spec.network == "none" else "host", "--user", f"{self._user}:{self._group}"),
            *("--read-only", "--ipc", "private", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--ulimit", "core=0"),
        ]

    def _limit_flags(self, spec: SandboxSpec, memory: int, held: frozenset[str]) -> list[str]:
        defaults = self._config.limits
        processes = (spec.max_processes or defaults.max_processes) + OVERHEAD_PROCESSES
        found = ["--memory", str(memory), "--memory-swap", str(memory), "--pids-limit", str(processes)]
        if (cpus := spec.cpus or defaults.cpus) is not None and "cpus" in held:
            found += ["--cpus", str(cpus)]
        return found

    def _mount_flags(self, spec: SandboxSpec, folder: RunFolder) -> list[str]:
        disk = spec.disk_bytes or self._config.limits.disk_bytes
        shared = f"rw,exec,nosuid,nodev,size={disk},mode=1777"
        # Executable, since the control shell runs from a copy in it.
        found = ["--tmpfs", f"/dev/shm:rw,exec,nosuid,nodev,size={SHM_BYTES},mode=1777"]  # noqa: S108  inside
        workdir = _require_mountable(spec.workdir or DEFAULT_WORKDIR)
        for path in ("/tmp", "/var/tmp", "/root", workdir):  # noqa: S108  inside
            found += ["--tmpfs", f"{path}:{shared}"]
        for bind in (Bind(str(folder.pipes), PIPES), *spec.read_only_binds):
            source, target = _require_mountable(bind.source), _require_mountable(bind.target)
            found += ["--mount", f"type=bind,source={source},target={target},readonly"]
        return [*found, "--mount", f"type=bind,source={folder.sockets},target={SOCKETS}"]

    async def sweep(self) -> SweepReport:
        swept = await super().sweep()
        with suppress(ProviderUnavailableError):
            await self._find_held()
        removed, failures = await self._containers.sweep()
        return SweepReport(swept.sandboxes + removed, swept.processes, (*swept.failures, *failures))


def _client_env(host: str | None) -> dict[str, str]:
    """Return only what the client needs to find its daemon."""
    names = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "CONTAINER_HOST")
    found = {name: os.environ[name] for name in names if name in os.environ}
    return {**found, **({"DOCKER_HOST": host} if host else {})}


def _require_mountable(path: str) -> str:
    """
    Raises:
        SandboxConfigError: The path cannot be part of a mount flag.
    """
    if not path.startswith("/") or any(character in path for character in ':,"\\\n'):
        raise SandboxConfigError(f"cannot mount {path!r}", hint='give an absolute path without : , " \\')
    return path

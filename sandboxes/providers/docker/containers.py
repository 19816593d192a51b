"""Query Docker's client: which limits hold, and our containers, their removal and their control groups."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxes.errors import SandboxClosedError
from sandboxes.host.processes import processes_of
from sandboxes.limits.cgroups import CGROUPS, ControlGroup
from sandboxes.reclaim.reaper import claim

ASK_SECONDS = 30.0


class Containers:
    """One daemon, through its client."""

    SANDBOX = "rollout-service.sandbox"
    """The label that names a container's sandbox."""
    SERVICE = "rollout-service.folder"
    """The label that names the folder that a container's service keeps locked while it lives (see `reaper`)."""

    def __init__(self, binary: str, env: Mapping[str, str]) -> None:
        self._binary = binary
        self.env = dict(env)
        """The client's environment."""

    async def ask(self, *arguments: str) -> tuple[int, str]:
        """Run the client; return its exit code and output. A client that hangs is killed."""
        return await anyio.to_thread.run_sync(self._ask, arguments)

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

    def find_limits(self) -> frozenset[str]:
        """Return the limits that the daemon can enforce here, or none if it does not answer. Blocks."""
        code, said = self._ask(("info", "--format", "{{json .}}"))
        try:
            info = json.loads(said) if code == 0 else {}
        except ValueError:
            return frozenset()
        names = {"MemoryLimit": "memory", "PidsLimit": "processes", "CPUCfsQuota": "cpus"}
        names |= {"CpuCfsQuota": "cpus"}
        return frozenset(found for name, found in names.items() if info.get(name))

    async def remove_sandbox(self, sandbox_id: str) -> None:
        """Remove the containers of one sandbox; the next sweep tries again if that fails."""
        for container, _ in await self._labeled(f"{self.SANDBOX}={sandbox_id}"):
            await self.ask("rm", "--force", "--volumes", container)

    async def count_processes(self, sandbox_id: str) -> int:
        """Count the processes of a sandbox's container.

        Raises:
            SandboxClosedError: The container no longer exists.
        """
        code, said = await self.ask("top", await self._container(sandbox_id), "-o", "pid")
        if code != 0:
            raise SandboxClosedError(f"cannot list the processes of sandbox {sandbox_id}: {said.strip()}")
        return len(said.split()) - 1  # without the heading

    async def make_reader(self, sandbox_id: str, image: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs the file reader in a second container.

        That container sees the sandbox's processes, and its files through them. It has no network, and no rights except
        to read and inspect. The reader's script is bound from the host.

        Raises:
            SandboxClosedError: The sandbox's container no longer exists.
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
        """Remove the containers of dead services; return how many, and why others could not be removed."""
        removed, failures = 0, []
        for container, folder in await self._labeled(self.SERVICE):
            if await anyio.to_thread.run_sync(_is_dead, Path(folder)):
                code, said = await self.ask("rm", "--force", "--volumes", container)
                removed += code == 0
                if code != 0 and "No such container" not in said:
                    failures.append(f"container {container}: {said.strip()}")
        return removed, tuple(failures)

    async def _labeled(self, label: str) -> list[tuple[str, str]]:
        """Return the containers with a label, and the folders of their services."""
        shown = '{{.ID}} {{.Label "' + self.SERVICE + '"}}'
        code, said = await self.ask(
            "ps", "--all", "--no-trunc", "--filter", f"label={label}", "--format", shown
        )
        lines = said.splitlines() if code == 0 else []
        return [(container, folder) for container, _, folder in (line.partition(" ") for line in lines)]


def container_group(sandbox_id: str) -> ControlGroup | None:
    """Return the group that counts a container's memory, or None if its process is not visible on this host.

    Reads all of /proc: call it in a thread.
    """
    ours = _memory_folder("self")
    folders = (_memory_folder(str(pid)) for pid in processes_of({sandbox_id}))
    # Skip our own group: the client that started the container has the mark too.
    found = next((folder for folder in folders if folder is not None and folder != ours), None)
    return ControlGroup({"memory": found}) if found is not None else None


def _memory_folder(pid: str) -> Path | None:
    """Return the folder that counts a process's memory, in either version of control groups."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                folder = CGROUPS / ("memory" if controllers else "") / path.lstrip("/")
                if (folder / ("memory.oom_control" if controllers else "memory.events")).exists():
                    return folder
    return None


def _is_dead(folder: Path) -> bool:
    """Return whether nobody holds the folder, so its service has ended or never ran on this host."""
    with claim(folder) as owner:
        return owner is not None

"""Sandboxes in Apptainer: one `apptainer exec` each, whose first process inside is the control shell.

What a sandbox has of its own: user, process, mount, network (none but a loopback that is down) and IPC
namespaces; a clean environment; no capability and no way to gain one; the image, read-only, below a writable
overlay that vanishes with it. It never runs as the host's root: a service that is root gives up root first, since
even without capabilities that user could write to the host's /proc/sys.

What it shares: the kernel. `enforced` says which limits hold for a sandbox as a whole: memory and processor time
do only where control groups can be made, and the disk does only as root. Elsewhere the memory limit holds for
each process, and the disk limit for each file.
"""

import os
import pwd
from functools import cached_property
from pathlib import Path

import anyio.to_thread

from sandboxes.config import ApptainerConfig
from sandboxes.contract import SandboxSpec
from sandboxes.control import SCRIPT
from sandboxes.errors import ProviderUnavailableError, SandboxConfigError
from sandboxes.host import INSTALL_HINT, find_apptainer
from sandboxes.images import ImageStore
from sandboxes.limits import Groups, Limits, find_groups
from sandboxes.process import MARKER
from sandboxes.provider import HostProvider, Plan
from sandboxes.rundir import RunFolder
from sandboxes.unpacked import UnpackedImages

LAUNCH = Path(__file__).with_name("launch.sh")
PIPES, SOCKETS = "/run/rollout/pipes", "/run/rollout/sockets"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The control shell runs from a copy of bash that can be executed but not read: the kernel then lets no process
# inside look into it, trace it, or take its descriptors.
HIDE = (
    'copy=/dev/shm/.control; cp /bin/bash "$copy" 2>/dev/null && chmod 0111 "$copy" || copy=/bin/bash; '
    'exec "$copy" --norc "$@"'
)

FLAGS = (
    "--containall",
    "--cleanenv",
    "--no-home",
    "--no-privs",
    "--no-init",  # the control shell is process 1: nothing inside can kill it, and all ends with it
    "--userns",
    "--no-mount",
    "tmp,home,cwd,bind-paths",  # /tmp is the image's, in the overlay, within the disk limit
)


class ApptainerProvider(HostProvider):
    """Starts sandboxes in Apptainer, as root or as an ordinary user."""

    name = "apptainer"
    isolates = True

    def __init__(self, config: ApptainerConfig, state_dir: Path, images: ImageStore | None = None) -> None:
        """
        Raises:
            ProviderUnavailableError: Apptainer is not installed.
            SandboxConfigError: there is no user of the configured name.
        """
        super().__init__(state_dir, config.run_dir, config.start_timeout)
        self._config = config
        self._binary = _binary(config.binary)
        self._images = images or ImageStore()
        self._user, self._group = _ids(config.user)
        unpacked = self._images.root.parent / "unpacked"
        self._unpacked = UnpackedImages(self._binary, unpacked, self._user, self._group)

    @cached_property
    def _groups(self) -> Groups:
        return find_groups()

    def groups(self) -> Groups:
        return self._groups

    @property
    def enforced(self) -> frozenset[str]:
        """Of memory, processes, cpus and disk: what this host lets the provider enforce for a whole sandbox."""
        disk = {"disk"} if os.geteuid() == 0 else set()
        return self._groups.enforced | disk | {"processes"}

    async def plan(self, spec: SandboxSpec, folder: RunFolder) -> Plan:
        name = spec.image or self._config.image
        image = await anyio.to_thread.run_sync(self._images.resolve, name)
        if self._config.unpack and image.is_file():
            image = await self._unpacked.provide(image)
        defaults = self._config.limits
        limits = Limits(
            spec.memory_bytes or defaults.memory_bytes,
            spec.max_processes or defaults.max_processes,
            spec.cpus or defaults.cpus,
        )
        command = [
            *self._exec(spec, folder),
            str(folder.overlay / "image" if self._root else image),
            *("/bin/bash", "--norc", "-c", HIDE, "hide"),
            *(f"{PIPES}/{SCRIPT.name}", PIPES, spec.workdir, str(limits.max_processes)),
            # Without control groups the next best thing: each process alone is limited.
            "0" if "memory" in self.enforced else str((limits.memory_bytes or 0) // 1024),
        ]
        launch = ["/bin/sh", "-c", LAUNCH.read_text(), "launch", *command]
        return Plan(
            argv=["unshare", "--mount", "--propagation", "private", "--", *launch] if self._root else launch,
            env=self._launch_env(spec, folder, image),
            image=name,
            limits=limits,
            user=self._user,
            group=self._group,
            pipes_inside=PIPES,
            sockets_inside=SOCKETS,
            workdir=spec.workdir,
            session_env={"HOME": "/root", "TERM": "dumb", "LANG": "C.UTF-8"},
        )

    @property
    def _root(self) -> bool:
        return os.geteuid() == 0

    def _exec(self, spec: SandboxSpec, folder: RunFolder) -> list[str]:
        """The command up to the image."""
        net = ["--net", "--network", "none"] if spec.network == "none" else []
        return [
            *(str(self._binary), "--silent", "exec", *FLAGS, *net),
            *("--overlay", str(folder.overlay / "data")),
            *("--bind", f"{folder.pipes}:{PIPES}:ro", "--bind", f"{folder.sockets}:{SOCKETS}"),
            *(flag for bind in self._binds(spec, folder) for flag in ("--bind", bind)),
            *("--env", f"{MARKER}={folder.id}"),
        ]

    def _binds(self, spec: SandboxSpec, folder: RunFolder) -> list[str]:
        """Apptainer's form of the binds; as root the launcher shows their sources where its user can see them."""
        found = []
        for number, bind in enumerate(spec.read_only_binds):
            for path in (bind.source, bind.target):
                if not path.startswith("/") or any(character in path for character in ":,\\\n"):
                    raise SandboxConfigError(
                        f"{path!r} cannot be bound", hint="give an absolute path without : , \\"
                    )
            source = folder.overlay / f"bind{number}" if self._root else bind.source
            found.append(f"{source}:{bind.target}:ro")
        return found

    def _launch_env(self, spec: SandboxSpec, folder: RunFolder, image: Path) -> dict[str, str]:
        disk_bytes = spec.disk_bytes or self._config.limits.disk_bytes
        conf = str(folder.overlay / "conf")
        env = {"PATH": PATH, "HOME": conf, "APPTAINER_CONFIGDIR": conf, "APPTAINER_CACHEDIR": conf}
        env |= {"LAUNCH_SPACE": str(folder.overlay)}
        if not self._root:
            return env | {"LAUNCH_FILE_BLOCKS": str(disk_bytes // 512)}
        return env | {
            "LAUNCH_USER": str(self._user),
            "LAUNCH_GROUP": str(self._group),
            "LAUNCH_BYTES": str(disk_bytes),
            "LAUNCH_IMAGE": str(image),
            "LAUNCH_BINDS": "\n".join(bind.source for bind in spec.read_only_binds),
        }


def _binary(configured: Path | None) -> Path:
    if configured is None:
        return find_apptainer()
    if not os.access(configured, os.X_OK):
        raise ProviderUnavailableError(f"{configured} is not an executable file", hint=INSTALL_HINT)
    return configured


def _ids(name: str) -> tuple[int, int]:
    """Whom sandboxes run as: this user, or for root the one with the name."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    try:
        entry = pwd.getpwnam(name)
    except KeyError as error:
        raise SandboxConfigError(f"there is no user {name!r}", hint="make it, or set sandbox.user") from error
    if entry.pw_uid == 0:
        raise SandboxConfigError("sandboxes never run as root", hint="set sandbox.user to another user")
    return entry.pw_uid, entry.pw_gid

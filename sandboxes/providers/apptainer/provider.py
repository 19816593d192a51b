"""Sandboxes in Apptainer: one `apptainer exec` each, or a repetition of one, whose first process is the control shell.

A sandbox has its own user, process, mount, network and IPC namespaces, a clean environment, and no capabilities or way
to gain any. The image is read-only, below a writable overlay that vanishes with the sandbox; code may remove and rename
the image's folders, with the exceptions of `Launcher.can_change_images`. Nothing runs as the host's root, who could
write to the host's /proc/sys even without capabilities.

Sandboxes share the kernel. `enforced` names the limits that hold for a sandbox as a whole. Memory and processor time
need control groups; the disk limit and lists of hosts need user namespaces for plain programs. Otherwise the memory
limit holds for each process and the disk limit for each file, and a list of hosts is refused.
"""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import anyio.to_thread
import structlog

from sandboxes.config import ApptainerConfig, default_cache, parse_user_range
from sandboxes.contract import DEFAULT_WORKDIR, Bind, Pausing, SandboxSpec
from sandboxes.egress.rules import AllowList
from sandboxes.errors import ImageNotFoundError, ProviderUnavailableError, SandboxConfigError, SandboxStartError
from sandboxes.host.children import ChildProcess
from sandboxes.host.facts import INSTALL_HINT, NAMESPACES_HINT, find_apptainer
from sandboxes.host.processes import MARKER
from sandboxes.host.subordinate_ids import has_subordinate_ids, resolve_user, subordinate_ids_command
from sandboxes.host.uid_leases import HostUsers, UserLease
from sandboxes.images import toolkit
from sandboxes.images.store import ImageStore
from sandboxes.images.unpacked import UnpackedImages, file_identity, portable_identity
from sandboxes.limits.cgroups import ControlGroups, ResourceLimits, find_control_groups
from sandboxes.providers.apptainer.fork_server import ForkServer
from sandboxes.providers.apptainer.launch.container import ContainerCommand
from sandboxes.providers.apptainer.launcher import Launcher
from sandboxes.providers.apptainer.setups import REPORT, ContainerSetups
from sandboxes.providers.base import (
    BASH,
    HIDDEN_BASH,
    HIDE,
    PIPES,
    SOCKETS,
    EgressPlan,
    HostProvider,
    LaunchPlan,
)
from sandboxes.providers.layers import MAX_LAYERS, FileLayer, LayeredSnapshot
from sandboxes.reclaim.host_resources import LauncherResources
from sandboxes.reclaim.run_folders import RunFolder
from sandboxes.runtime.control import SCRIPT

log = structlog.get_logger(__name__)

PROXY_PORT = 3128
"""In the sandbox's own network, where nothing else can have taken it."""

FLAGS = (
    "--containall",
    "--cleanenv",
    "--no-home",
    "--no-init",  # the control shell is process 1: nothing inside can kill it, and everything ends with it
    "--no-mount",
    # /tmp is the image's, in the overlay, within the disk limit. /sys belongs to the sandbox's network, without the
    # host's control groups, which an ordinary user's sandbox could change.
    "tmp,home,cwd,bind-paths,sys",
)


# The capabilities of root in its own user namespace, as is usual in containers. The control shell keeps more, so
# nothing inside can inspect or trace it, and nothing inside can mount a file system.
KEPT = "chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,setfcap,net_bind_service,sys_chroot"
GIVE_UP = (
    "setpriv",
    "--inh-caps=-all",
    "--ambient-caps=-all",
    "--bounding-set=-all," + ",".join(f"+{name}" for name in KEPT.split(",")),
    "--no-new-privs",
    "--",
)


SESSION_ENV = {"HOME": "/root", "TERM": "dumb", "LANG": "C.UTF-8"}
REFUSED = (errno.EPERM, errno.ENOSYS, errno.EINVAL)
"""The errors of a host that lets no process make a child of its parent."""
KNOWN_FAILURES = dict.fromkeys(
    ("image_folders_removed", "image_folders_renamed"),
    "this host lets the service mount no overlay that can note the removal of an image's folder",
)


@dataclass(frozen=True, slots=True)
class _Container:
    arguments: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    """Instructions to do the same without Apptainer; empty if it must run."""
    on_ready: Callable[[], None] | None = None


class ApptainerProvider(HostProvider):
    name = "apptainer"
    isolates = True

    def __init__(self, config: ApptainerConfig, state_dir: Path, images: ImageStore | None = None) -> None:
        """
        Raises:
            ProviderUnavailableError: Apptainer is not installed.
            SandboxConfigError: The configured user does not exist, or has no ids for fakeroot.
        """
        super().__init__(state_dir, config.run_dir, config.start_timeout)
        self._config = config
        self._binary = _find_binary(config.binary)
        self._images = images or ImageStore()
        self._user, self._group = resolve_user(config.user)
        numbers = None if config.fakeroot or os.geteuid() != 0 else parse_user_range(config.user_range)
        self._users = None if numbers is None else HostUsers(numbers)
        self.launcher = Launcher(self._user, self._group, fakeroot=config.fakeroot)
        if config.fakeroot and not has_subordinate_ids(self._user):
            raise SandboxConfigError(
                f"fakeroot needs ids for user {self._user} in /etc/subuid and /etc/subgid",
                hint=subordinate_ids_command(self._user),
            )
        self._setups = ContainerSetups()
        self._fork_server = ForkServer(self.lingering_children)
        self._forks = True
        self.prepared_images = PreparedImages(config, self._images, self._binary, (self._user, self._group))

    @cached_property
    def _groups(self) -> ControlGroups:
        return find_control_groups()

    def groups(self) -> ControlGroups:
        return self._groups

    @property
    def pausing(self) -> Pausing:
        return self._groups.pausing

    @property
    def enforced(self) -> frozenset[str]:
        disk = {"disk"} if self.launcher.mounts else set()
        users = {"users"} if self._gives_own_users else set()
        return self._groups.enforced | disk | users | {"processes"}

    @property
    def known_failures(self) -> Mapping[str, str]:
        unpacked = self.prepared_images.unpacked.root
        fails = self._config.unpack and not self.launcher.can_change_images(unpacked, unpack=True)
        return KNOWN_FAILURES if fails else {}

    async def identity(self, spec: SandboxSpec) -> str:
        return await anyio.to_thread.run_sync(self._identity, spec)

    def _identity(self, spec: SandboxSpec) -> str:
        image = self._images.resolve(spec.image or self._config.image)
        try:
            binds = (file_identity(Path(bind.source)) for bind in spec.read_only_binds)
            return "\n".join([portable_identity(image), *binds])
        except OSError as error:
            raise SandboxConfigError(f"cannot read the sandbox's image or binds: {error}") from error

    async def plan(self, spec: SandboxSpec, folder: RunFolder) -> LaunchPlan:
        allowed = _parse_allow_list(spec)
        self.launcher.require_enterable(folder.path.parent, others=self._users is not None)
        listens_inside = spec.listens and spec.network != "full"
        if allowed is not None:
            await self._require_namespaces("restrict a sandbox's network to a list of hosts")
        elif listens_inside:
            await self._require_namespaces("listen inside a sandbox")
        prepared = await self.prepared_images.prepare(spec.image or self._config.image)
        workdir = spec.workdir or prepared.workdir or DEFAULT_WORKDIR
        spec = replace(spec, read_only_binds=(*spec.read_only_binds, *prepared.binds))
        limits = self._limits_of(spec)
        overlay, repeats = await anyio.to_thread.run_sync(self._try_image, prepared.image)
        script = self._control_script(limits, workdir)
        container = self._choose_container(spec, folder, prepared.image, script, overlay=overlay, repeats=repeats)
        # This is the last wait: once there is a plan, a cancelled start returns the lease, and holds the layers.
        lease = await anyio.to_thread.run_sync(self._lease_user, prepared.image)
        try:
            layers = self._layers_of(spec, prepared.image)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        user = self._user if lease is None else lease.number
        env = self.launcher.make_env(
            folder.overlay,
            spec.disk_bytes or self._config.limits.disk_bytes,
            network=spec.network != "full",
            image=prepared.image,
            overlay="notes" if overlay else "plain" if container.variables else None,
            points=[f"{PIPES}/", f"{SOCKETS}/", *map(_mount_point, spec.read_only_binds)],
            binds=[bind.source for bind in spec.read_only_binds],
            layers=[layer.instruction for layer in layers],
            saved=spec.saved,
            user=None if lease is None else user,
        )
        return LaunchPlan(
            argv=container.arguments,
            env=env | container.variables,
            image=spec.image or self._config.image,
            limits=limits,
            user=user,
            group=self._group,
            lease=lease,
            pipes_inside=PIPES,
            sockets_inside=SOCKETS,
            workdir=workdir,
            own_space=True,
            prefix=GIVE_UP if self._config.fakeroot else (),
            python=prepared.python,
            session_env=SESSION_ENV | prepared.user_env | _proxy_env(allowed),
            egress=self._plan_egress(allowed),
            listens=("sandbox" if listens_inside else "host") if spec.listens else None,
            layers=layers,
            make_snapshot=partial(self._snapshot, folder, prepared.image, user, layers)
            if len(layers) < MAX_LAYERS and self._keeps_files(prepared.image)
            else None,
            save_command=partial(self.launcher.save_command, folder.overlay) if overlay and self._can_save else None,
            on_ready=container.on_ready,
        )

    def _choose_container(
        self,
        spec: SandboxSpec,
        folder: RunFolder,
        image: Path,
        script: Sequence[str],
        *,
        overlay: bool,
        repeats: bool,
    ) -> _Container:
        shown = str(self.launcher.image_path(image, folder.overlay, overlay=overlay))
        options = self._exec_command(spec, folder, overlay=overlay)
        command = ContainerCommand([*options, shown, BASH, "--norc", "-c", HIDE, "hide", *script], shown)
        kind = self._setups.key(command.arguments, image, folder) if repeats else None
        if kind is not None and kind not in self._setups and spec.snapshot is None and spec.saved is None:
            command = command.replaced(HIDE, REPORT + HIDE)
            return _Container(command.arguments, on_ready=partial(self._setups.learn, kind, folder, command))
        if (setup := self._setups.get(kind)) is not None:
            return _Container([*options, shown, HIDDEN_BASH, "--norc", *script], setup.variables(folder, shown))
        return _Container(command.arguments)

    async def spawn(
        self, argv: Sequence[str], env: Mapping[str, str], channel: int, output: int, kept: Sequence[int]
    ) -> ChildProcess:
        if self._forks:
            descriptors = {0: channel, 1: output, 2: output} | {number: number for number in kept}
            try:
                return await self._fork_server.launch(argv, env, descriptors)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                log.warning("each launcher starts Python, as it cannot be forked here", reason=str(error))
                self._forks = False
        return await super().spawn(self.launcher.make_command(argv), env, channel, output, kept)

    async def _require_namespaces(self, what: str) -> None:
        if not await anyio.to_thread.run_sync(lambda: self.launcher.namespaces):
            raise SandboxConfigError(
                f"cannot {what} on this host",
                hint="set sandbox.fakeroot to false"
                if self._config.fakeroot and self.launcher.root
                else NAMESPACES_HINT,
            )

    def _limits_of(self, spec: SandboxSpec) -> ResourceLimits:
        defaults = self._config.limits
        return ResourceLimits(
            spec.memory_bytes or defaults.memory_bytes,
            spec.max_processes or defaults.max_processes,
            spec.cpus or defaults.cpus,
            spec.disk_bytes or defaults.disk_bytes,
        )

    def _control_script(self, limits: ResourceLimits, workdir: str) -> list[str]:
        # Without control groups, limit each process separately.
        each = 0 if "memory" in self._groups.enforced else (limits.memory_bytes or 0) // 1024
        script = f"{PIPES}/{SCRIPT.name}"
        return [script, PIPES, workdir, str(limits.max_processes), str(each)]

    def _try_image(self, image: Path) -> tuple[bool, bool]:
        repeats = self._config.reuse_setups and self.launcher.can_make_container(image)
        return self.launcher.can_overlay(image), repeats

    @property
    def _can_save(self) -> bool:
        """The files of a sandbox are one user's, so that they need no owners."""
        return not self._config.fakeroot

    async def saves(self, spec: SandboxSpec) -> bool:
        prepared = await self.prepared_images.prepare(spec.image or self._config.image)
        return self._can_save and await anyio.to_thread.run_sync(self.launcher.can_overlay, prepared.image)

    async def takes_snapshots(self, spec: SandboxSpec) -> bool:
        prepared = await self.prepared_images.prepare(spec.image or self._config.image)
        return await anyio.to_thread.run_sync(self._keeps_files, prepared.image)

    def _keeps_files(self, image: Path) -> bool:
        return self.launcher.can_overlay(image) and (self.launcher.can_map_files or not self._has_users(image))

    @staticmethod
    def _layers_of(spec: SandboxSpec, image: Path) -> tuple[FileLayer, ...]:
        if spec.snapshot is None:
            return ()
        if isinstance(spec.snapshot, LayeredSnapshot):
            return spec.snapshot.layers_on(image)
        raise SandboxConfigError("the snapshot is one of another provider")

    def _snapshot(
        self,
        folder: RunFolder,
        image: Path,
        user: int,
        below: tuple[FileLayer, ...],
        resources: LauncherResources,
    ) -> LayeredSnapshot:
        launcher = resources.pid
        if launcher is None:
            raise ProcessLookupError("the launcher has ended")
        layer = FileLayer(folder, launcher, user, has_users=not self.launcher.root)
        snapshot = LayeredSnapshot(image, (layer, *below))
        resources.keeps_files = True
        return snapshot

    def _plan_egress(self, allowed: AllowList | None) -> EgressPlan | None:
        if allowed is None:
            return None
        return EgressPlan(allowed, PROXY_PORT, self._config.private_addresses, self._user, self._group)

    def _lease_user(self, image: Path) -> UserLease | None:
        """Return None if all sandboxes share one user."""
        return self._users.lease() if self._users is not None and self._has_users(image) else None

    def _has_users(self, image: Path) -> bool:
        if self._users is None or not self._users.available:
            return False
        return self.launcher.can_map(image, self._users.first) if image.is_dir() else self.launcher.namespaces

    @cached_property
    def _gives_own_users(self) -> bool:
        folder = self.prepared_images.unpacked.root
        return self._has_users(next(path for path in (folder, *folder.parents) if path.is_dir()))

    async def close(self) -> None:
        await self._fork_server.close()
        await super().close()
        if self._users is not None:
            self._users.close()

    def _exec_command(self, spec: SandboxSpec, folder: RunFolder, *, overlay: bool) -> list[str]:
        return [
            *(
                str(self._binary),
                "--silent",
                "exec",
                *FLAGS,
                *self.launcher.user_flags,
            ),
            *self.launcher.apptainer_flags(folder.overlay, network=spec.network != "full", overlay=overlay),
            *("--bind", f"{folder.pipes}:{PIPES}:ro", "--bind", f"{folder.overlay}/sockets:{SOCKETS}"),
            *(flag for bind in self._format_binds(spec, folder) for flag in ("--bind", bind)),
            *("--env", f"{MARKER}={folder.id}"),
        ]

    def _format_binds(self, spec: SandboxSpec, folder: RunFolder) -> list[str]:
        """As root, name the places where the launcher shows the sources to its user."""
        found = []
        for number, bind in enumerate(spec.read_only_binds):
            for path in (bind.source, bind.target):
                if not path.startswith("/") or any(character in path for character in ":,\\\n"):
                    raise SandboxConfigError(f"cannot bind {path!r}", hint="give an absolute path without : , \\")
            source = folder.overlay / f"bind{number}" if self.launcher.root else bind.source
            found.append(f"{source}:{bind.target}:ro")
        return found


def _mount_point(bind: Bind) -> str:
    return f"{bind.target}/" if Path(bind.source).is_dir() else bind.target


def _parse_allow_list(spec: SandboxSpec) -> AllowList | None:
    """Return None if the network is not a list of hosts."""
    if spec.network in {"none", "full"}:
        return None
    if isinstance(spec.network, str):
        raise SandboxConfigError(f"unknown network {spec.network!r}", hint='give "none", "full" or a list of hosts')
    return AllowList(spec.network)


def _proxy_env(allowed: AllowList | None) -> dict[str, str]:
    if allowed is None:
        return {}
    proxy = f"http://127.0.0.1:{PROXY_PORT}"
    variables = {
        "HTTP_PROXY": proxy,
        "HTTPS_PROXY": proxy,
        "ALL_PROXY": proxy,
        "NO_PROXY": "localhost,127.0.0.1,::1",
    }
    return variables | {name.lower(): value for name, value in variables.items()}


def _find_binary(configured: Path | None) -> Path:
    if configured is None:
        return find_apptainer()
    if not os.access(configured, os.X_OK):
        raise ProviderUnavailableError(f"{configured} is not an executable file", hint=INSTALL_HINT)
    return configured


# The image's own python3 is used if the image's files show that it runs and has ipykernel; otherwise the toolkit's is.
# This is determined once per image, when it is unpacked, and costs a start nothing.


@dataclass(frozen=True, slots=True)
class PreparedImage:
    image: Path
    """The image file, or its unpacked folder."""

    python: str = "python3"
    binds: tuple[Bind, ...] = ()
    workdir: str | None = None
    user_env: dict[str, str] = field(default_factory=dict)
    """HOME, USER and LOGNAME of the image's user."""


class PreparedImages:
    def __init__(self, config: ApptainerConfig, images: ImageStore, apptainer: Path, owner: tuple[int, int]) -> None:
        self._config = config
        self._images = images
        self.unpacked = UnpackedImages(
            apptainer,
            config.unpacked_dir or default_cache() / "unpacked",
            *owner,
            budget_bytes=config.unpacked_budget_bytes,
        )

    async def prepare(self, name: str) -> PreparedImage:
        """Prepare an image. The first time takes seconds if it has to be unpacked.

        Raises:
            ImageNotFoundError: The image does not exist, or the toolkit is required and its image does not exist.
            ImageError: The image cannot be unpacked, or the toolkit cannot be made.
            SandboxStartError: The folder of unpacked images cannot be written.
        """
        try:
            return await anyio.to_thread.run_sync(self._prepare, name)
        except OSError as error:
            raise SandboxStartError(
                f"the image {name} cannot be prepared: {error}", hint=f"see whether {self.unpacked.root} has room"
            ) from error

    def _prepare(self, name: str) -> PreparedImage:
        image = self._images.resolve(name)
        facts = None if self._config.unpack or image.is_dir() else self.unpacked.facts(image)
        if facts is None:
            unpacked = self.unpacked.provide(image)
            image, facts = unpacked.folder, unpacked.facts
        if self._config.python == "image" or (self._config.python == "auto" and not facts.needs_toolkit):
            return PreparedImage(image, workdir=facts.workdir, user_env=facts.user_env)
        try:
            folder = self.unpacked.toolkit(self._images.resolve(self._config.toolkit_image))
        except ImageNotFoundError:
            if self._config.python == "toolkit":
                raise
            # Bash works anyway; the start of a kernel reports what is missing.
            return PreparedImage(image, workdir=facts.workdir, user_env=facts.user_env)
        bind = Bind(str(folder), toolkit.INSIDE)
        return PreparedImage(image, toolkit.PYTHON, (bind,), facts.workdir, facts.user_env)

"""The command that launches sandboxes on this host: the program `launch`, its instructions, and what it can do here.

As root, and where plain programs may make user namespaces, `launch` makes a sandbox's file systems and network.
Elsewhere (Ubuntu's AppArmor allows user namespaces only to programs that it knows) Apptainer makes the network, and an
ordinary user's sandbox has no file system with a size limit.

The overlay on an unpacked image is `launch`'s as well: in Apptainer's, removing a folder of the image fails with EIO.
"""

import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import structlog

from sandboxes.errors import SandboxConfigError, SandboxStartError
from sandboxes.host.facts import NAMESPACES_HINT
from sandboxes.host.kernel_calls import alone
from sandboxes.host.subordinate_ids import SUBGID, SUBUID, has_subordinate_ids, subordinate_ids_of
from sandboxes.providers.apptainer import seccomp

log = structlog.get_logger(__name__)

FOLDER = Path(__file__).parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROBE_SECONDS = 10.0
PROBE_BYTES = 1024 * 1024
OVERLAYS_OF_MAPPED = (5, 19)
MAPPED_TMPFS = (6, 3)
POINTS = ("/dev/", "/proc/", "/sys/", "/etc/hosts", "/etc/resolv.conf")
"""Apptainer mounts something here in every image; a folder ends with "/"."""


class Launcher:
    def __init__(self, user: int, group: int, *, fakeroot: bool = False) -> None:
        """Sandboxes run as `user` and `group`.

        With `fakeroot`, Apptainer maps a range of ids, and must run in the host's user namespace.
        """
        self._user, self._group = user, group
        self._fakeroot = fakeroot
        self.root = os.geteuid() == 0
        self._found: dict[tuple[str, object], bool] = {}

    @cached_property
    def namespaces(self) -> bool:
        """Whether a launch can make namespaces, and Apptainer others in them. Tried once, in 20 ms."""
        if self._fakeroot and (self.root or not has_subordinate_ids(self._user)):
            return False  # root's sandboxes get their ids from Apptainer
        told = {"LAUNCH_NAMESPACES": "1", "LAUNCH_NETWORK": "1"} | self._user_env()
        failure = self._try_launch(told, ["true"] if self._fakeroot else ["unshare", "--user", "true"])
        if failure is not None:
            log.warning(
                "cannot restrict sandboxes to a list of hosts, or those of ordinary users to a disk limit",
                reason=failure,
                use=NAMESPACES_HINT,
            )
        return failure is None

    @property
    def mounts(self) -> bool:
        return self.root or self.namespaces

    @staticmethod
    def make_command(apptainer: Sequence[str]) -> list[str]:
        return [*alone("sandboxes.providers.apptainer.launch.steps"), *apptainer]

    @staticmethod
    def save_command(space: Path, launcher: int, limit: int) -> list[str]:
        return [*alone("sandboxes.providers.apptainer.launch.saved_files"), str(launcher), str(space), str(limit)]

    def make_env(
        self,
        space: Path,
        disk_bytes: int,
        *,
        network: bool,
        image: Path,
        overlay: Literal["notes", "plain"] | None,
        points: Sequence[str],
        binds: Sequence[str],
        layers: Sequence[str],
        saved: Path | None = None,
        user: int | None = None,
    ) -> dict[str, str]:
        """Return the variables that instruct `launch`.

        Args:
            space: the folder for the sandbox's files.
            disk_bytes: the size of their file system.
            network: whether it has a separate network.
            image: the image on the host.
            overlay: see `can_overlay` for one with notes.
            points: the paths inside that Apptainer mounts something on besides `POINTS`.
            binds: the sources of binds on the host.
            layers: instructions for the layers between the image and the overlay, the newest first.
            saved: an archive to begin with, which needs the overlay; see `launch.saved_files`.
            user: a user that only this sandbox runs as.
        """
        conf = str(space / "conf")
        told = {"PATH": PATH, "HOME": conf, "APPTAINER_CONFIGDIR": conf, "APPTAINER_CACHEDIR": conf}
        told |= (
            {"LAUNCH_SPACE": str(space), "LAUNCH_BYTES": str(disk_bytes)}
            | self._user_env(user)
            | ({"LAUNCH_PROFILE": seccomp.build_profile()} if self._apptainer_filters else _filter_env())
        )
        if self.namespaces:
            told["LAUNCH_NAMESPACES"] = "1"
            if network:
                told["LAUNCH_NETWORK"] = "1"
        if self.root:
            told["LAUNCH_BINDS"] = "\n".join(binds)
        if self.root or overlay is not None:
            told["LAUNCH_IMAGE"] = str(image)
        if overlay is not None:
            told |= {"LAUNCH_OVERLAY": overlay, "LAUNCH_POINTS": "\n".join((*POINTS, *points))}
        if layers:
            told["LAUNCH_LAYERS"] = "\n".join(layers)
        if saved is not None:
            told["LAUNCH_SAVED"] = str(saved)
        return told

    def image_path(self, image: Path, space: Path, *, overlay: bool) -> Path:
        if overlay:
            return space / "root"
        return space / "image" if self.root else image

    @property
    def user_flags(self) -> tuple[str, ...]:
        """For the user namespace and the rights of the control shell."""
        if not self._fakeroot:
            return ("--no-privs", "--userns")
        return ("--keep-privs",) if self.namespaces else ("--fakeroot",)

    def apptainer_flags(self, space: Path, *, network: bool, overlay: bool) -> list[str]:
        """Return flags for everything that `launch` makes in `space`, and for the rest."""
        # Images without /etc/hosts are common. /dev/shm counts as disk; Apptainer's own would have no limit.
        mounts = ["sys:/sys:ro", "shm:/dev/shm"] if self.mounts else []
        binds = ["hosts:/etc/hosts", *mounts]
        found = ["--writable"] if overlay else ["--overlay", str(space / "data")]
        for bind in binds:
            found += ["--bind", f"{space}/{bind}"]
        if self._apptainer_filters:
            found += ["--security", f"seccomp:{space}/filter.json"]
        if self.mounts:
            found += ["--no-mount", "devpts", "--bind", "/dev/pts", "--bind", "/dev/ptmx"]
        return found + (["--net", "--network", "none"] if network and not self.namespaces else [])

    def require_enterable(self, folder: Path, *, others: bool) -> None:
        """Require that the sandboxes' user, or with `others` every user, can enter a folder.

        Raises:
            SandboxConfigError: The user cannot enter the folder or one above; the message names that folder.
        """
        for parent in (folder, *folder.parents):
            found = parent.stat()
            bit = stat.S_IXGRP if found.st_gid == self._group else stat.S_IXOTH
            if found.st_uid == self._user and not others:
                bit = stat.S_IXUSR
            if not found.st_mode & bit:
                raise SandboxConfigError(
                    f"the user that sandboxes run as cannot enter {parent}",
                    hint=f"run chmod o+x {parent}, or set sandbox.run_dir to a folder that everyone can enter",
                )

    def _user_env(self, user: int | None = None) -> dict[str, str]:
        if not self.root:
            return self._subordinate_env() if self._fakeroot else {}
        told = {"LAUNCH_USER": str(self._user if user is None else user), "LAUNCH_GROUP": str(self._group)}
        return told if user is None else told | {"LAUNCH_OWNER": str(self._user)}

    def _subordinate_env(self) -> dict[str, str]:
        files = {"LAUNCH_UIDS": SUBUID, "LAUNCH_GIDS": SUBGID}
        ranges = {name: subordinate_ids_of(self._user, file)[0].ids for name, file in files.items()}
        return {name: f"{ids.start} {len(ids)}" for name, ids in ranges.items()}

    def can_overlay(self, image: Path) -> bool:
        """Return whether `launch` can mount the overlay on an image. Tried once per file system, in 30 ms.

        It needs an unpacked image, the right to mount, and without root a tmpfs with attributes of users (6.6).
        """
        if not (self.mounts and image.is_dir()):
            return False
        namespaces = {"LAUNCH_NAMESPACES": "1"} if self.namespaces else {}
        told = {"LAUNCH_IMAGE": str(image), "LAUNCH_OVERLAY": "notes"} | namespaces | self._user_env()
        return self._works(
            "sandboxes cannot remove folders of the image", image.stat().st_dev, image, lambda: self._try_launch(told)
        )

    def can_change_images(self, unpacked: Path, *, unpack: bool) -> bool:
        """Return whether code may remove and rename folders of images, which are unpacked in `unpacked` or not at all.

        Image files that are not unpacked are mounted through FUSE, which also makes the overlay. They then belong to
        root, so an ordinary user may change them only with fakeroot.
        """
        if not unpack:
            return self.root or self._fakeroot
        return self.can_overlay(unpacked if unpacked.is_dir() else FOLDER)

    def can_make_container(self, image: Path) -> bool:
        """Return whether a launch can do what Apptainer does with an image. Tried once per image, in 50 ms.

        It needs mount_setattr(2) and the right to mount an overlay and /proc, and runs the image's bash in a container.
        """
        overlay = "notes" if self.can_overlay(image) else "plain"
        if self._fakeroot or not (self.namespaces and image.is_dir()) or (self.root and overlay == "plain"):
            return False
        told = {"LAUNCH_IMAGE": str(image), "LAUNCH_OVERLAY": overlay, "LAUNCH_POINTS": "\n".join(POINTS)}
        told |= {"LAUNCH_NAMESPACES": "1", "LAUNCH_NETWORK": "1", "LAUNCH_DIRECT": "image"} | self._user_env()

        def run() -> str | None:
            with tempfile.TemporaryDirectory(prefix="rollout-") as space:
                binds = ("--bind", "/dev/pts", "--bind", f"{space}/hosts:/etc/hosts:ro")
                return self._run([*binds, "image", "/bin/bash", "--norc", "-c", "[[ -e /proc/1/stat ]]"], told, space)

        return self._works("each sandbox of this image runs Apptainer", image, image, run)

    @property
    def can_map_files(self) -> bool:
        """Whether a sandbox can see files of another that ran as a different user of the host."""
        return _kernel_version() >= MAPPED_TMPFS

    def can_map(self, folder: Path, user: int) -> bool:
        """Return whether a folder can be mounted with another owner. Tried once per file system, in 30 ms.

        It needs root, user namespaces, a kernel with overlays on such mounts (5.19), and a file system that supports
        them.
        """
        if not (self.root and self.namespaces):
            return False
        told = {"LAUNCH_NAMESPACES": "1", "LAUNCH_IMAGE": str(folder)} | self._user_env(user)

        def run() -> str | None:
            older = _kernel_version() < OVERLAYS_OF_MAPPED
            return self._try_launch(told) or (f"Linux {os.uname().release}" if older else None)

        return self._works("sandboxes share one user of the host", folder.stat().st_dev, folder, run)

    def _works(self, failing: str, place: object, path: Path, run: Callable[[], str | None]) -> bool:
        """Return whether a trial at a place succeeds; the first one runs it, and logs why it fails."""
        if (failing, place) not in self._found:
            if (failure := run()) is not None:
                log.warning(failing, path=str(path), reason=failure)
            self._found[failing, place] = failure is None
        return self._found[failing, place]

    def _try_launch(self, told: dict[str, str], command: Sequence[str] = ("true",)) -> str | None:
        path = shutil.which(command[0], path=PATH) or command[0]
        with tempfile.TemporaryDirectory(prefix="rollout-") as space:
            return self._run([path, *command[1:]], told, space)

    def _run(self, command: Sequence[str], told: dict[str, str], space: str) -> str | None:
        """Return why a launch fails, or None.

        Raises:
            SandboxStartError: It takes too long to tell.
        """
        told |= {"LAUNCH_SPACE": space, "LAUNCH_BYTES": str(PROBE_BYTES)} | _filter_env()
        try:
            done = subprocess.run(
                self.make_command(command),
                env={"PATH": PATH, **told},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PROBE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SandboxStartError(
                f"a trial launch took more than {PROBE_SECONDS:g} s", hint="check what keeps this host busy"
            ) from error
        return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"

    @property
    def _apptainer_filters(self) -> bool:
        """Whether Apptainer has to set the filter: it could not start newuidmap under it."""
        return self._fakeroot and not self.root and not self.namespaces


def _filter_env() -> dict[str, str]:
    program = seccomp.build_program()
    return {} if program is None else {"LAUNCH_FILTER": program.hex()}


def _kernel_version() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])

"""The folders of live services and their sandboxes on the host: short, since Unix sockets allow 107 bytes; private.

A service has one folder, whose name begins the ids of its sandboxes, and holds a lock on it for as long as it
lives; see `reaper`. (Cleaners of /tmp that know locks leave it alone, too.) In it every sandbox has one:

pipes/    named pipes of processes; read-only inside, where it can be entered but not listed
sockets/  the kernel's sockets; writable inside
overlay/  what the sandbox writes         image  the image, as the launcher sees it
log       what the launcher says
"""

import hashlib
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from sandboxes.errors import SandboxConfigError
from sandboxes.host.locks import is_still_at, try_lock
from sandboxes.reclaim.reaper import write_owner

SOCKET_PATH_LIMIT = 107
NAME_BYTES = 4
NOTES = "run-dirs"
LONGEST = "00000000/0000000/sockets/00000000-5"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one sandbox and its parts."""

    path: Path

    @property
    def id(self) -> str:
        """The sandbox's id: the name of its service's folder, and its number there."""
        return f"{self.path.parent.name}-{self.path.name}"

    @property
    def pipes(self) -> Path:
        """See the module."""
        return self.path / "pipes"

    @property
    def sockets(self) -> Path:
        """See the module."""
        return self.path / "sockets"

    @property
    def overlay(self) -> Path:
        """See the module."""
        return self.path / "overlay"

    @property
    def image(self) -> Path:
        """See the module."""
        return self.path / "image"

    @property
    def log(self) -> Path:
        """See the module."""
        return self.path / "log"

    def log_tail(self, limit: int = 4096) -> str:
        """The end of what the launcher said, for an error message."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - limit))
            return file.read().decode("utf-8", errors="replace").strip() or "nothing"

    def create(self, user: int, group: int) -> None:
        """Make the folders; what the sandbox may write belongs to its user.

        Raises:
            OSError: the host has no space or no rights.
        """
        self.path.mkdir(mode=0o711)
        self.pipes.mkdir()
        self.pipes.chmod(0o311)
        for folder in (self.sockets, self.overlay):
            folder.mkdir(mode=0o700)
            os.chown(folder, user, group)
        self.log.touch(mode=0o600)


class ServiceFolder:
    """The folder of one service: locked by it, and so known to be alive."""

    def __init__(self, base: Path) -> None:
        """
        Raises:
            OSError: it cannot be made.
            SandboxConfigError: the file system cannot lock it.
        """
        self._numbers = count(1)
        while True:
            self.path = base / secrets.token_hex(NAME_BYTES)
            if (handle := _make_locked(self.path)) is not None:
                self._handle = handle
                return

    @property
    def name(self) -> str:
        """What the ids of its sandboxes begin with."""
        return self.path.name

    def describe(self, groups: Iterable[str]) -> None:
        """Say for a later sweep what the paths of its sandboxes' control groups begin with."""
        write_owner(self.path, groups)

    @property
    def intact(self) -> bool:
        """Whether it is where it was made: somebody may have emptied /tmp."""
        return is_still_at(self._handle, self.path)

    def new(self) -> RunFolder:
        """A folder for a new sandbox; nothing is made yet."""
        return RunFolder(self.path / str(next(self._numbers)))

    def close(self) -> None:
        """Give up the lock: whatever is left in it may be swept by anyone. Called once."""
        os.close(self._handle)


def _make_locked(path: Path) -> int | None:
    """Make a folder and lock it; None where the name is taken, or a sweep was faster than the lock."""
    try:
        path.mkdir(mode=0o711)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileExistsError, FileNotFoundError):
        if not path.parent.is_dir():
            raise
        return None
    try:
        if try_lock(handle) and is_still_at(handle, path):
            return handle
    except OSError as error:
        path.rmdir()
        raise SandboxConfigError(
            f"folders in {path.parent} cannot be locked: {error}",
            hint="set sandbox.run_dir to a folder on a local disk or in memory",
        ) from error
    os.close(handle)
    return None


def run_base(configured: Path | None) -> Path:
    """The folder of all services of this user: configured, or below XDG_RUNTIME_DIR, or in /tmp. Made if missing.

    Raises:
        SandboxConfigError: it is not this user's alone, or its path is too long for sockets.
    """
    base = _choices(configured)[0]
    base.mkdir(mode=0o711, parents=True, exist_ok=True)
    if not _is_private(base):
        raise SandboxConfigError(
            f"{base} is not a folder that only this user can write to",
            hint="remove it, or set sandbox.run_dir",
        )
    longest = base / LONGEST
    if len(os.fsencode(longest)) > SOCKET_PATH_LIMIT:
        raise SandboxConfigError(
            f"{base} is too long: {longest} has more than the {SOCKET_PATH_LIMIT} bytes of a socket's path",
            hint="set sandbox.run_dir to a shorter path",
        )
    return base


def remember(state_dir: Path, base: Path) -> None:
    """Note for later sweeps that a service ran here: after a power cut another may be configured.

    Raises:
        OSError: the state cannot be written.
    """
    notes = state_dir / NOTES
    notes.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        (notes / hashlib.sha256(os.fsencode(base)).hexdigest()[:16]).symlink_to(base.absolute())


def run_bases(configured: Path | None, state_dir: Path) -> list[Path]:
    """Where services of this user may have left something: where they run, ran, or would without configuration."""
    notes = state_dir / NOTES
    noted = [note.readlink() for note in notes.iterdir() if note.is_symlink()] if notes.is_dir() else []
    found = dict.fromkeys([*_choices(configured), *noted])
    return [base for base in found if base.exists() and _is_private(base)]


def _choices(configured: Path | None) -> list[Path]:
    """Where this user's services may run, the best first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    usable = runtime is not None and os.access(runtime, os.W_OK)
    return [
        *([configured] if configured is not None else []),
        *([Path(runtime) / "rs"] if runtime and usable else []),
        Path(f"/tmp/rs-{os.geteuid()}"),  # noqa: S108  checked before it is used
    ]


def _is_private(base: Path) -> bool:
    found = base.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022

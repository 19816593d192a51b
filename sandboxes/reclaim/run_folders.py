"""The folders of live services and their sandboxes on the host.

Their paths are short, because Unix sockets allow 107 bytes, and they are private to one user. A service has one folder,
whose name begins the ids of its sandboxes, and holds a lock on it for as long as it lives; see `reaper`. (Cleaners of
/tmp that respect locks leave it alone too.) Each sandbox has a folder in it:

pipes/    named pipes of processes; read-only inside, where it can be entered but not listed
sockets/  the kernel's sockets; writable inside
overlay/  files that the sandbox writes
log       the launcher's output until the sandbox is ready
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
    path: Path

    @property
    def id(self) -> str:
        return f"{self.path.parent.name}-{self.path.name}"

    @property
    def pipes(self) -> Path:
        return self.path / "pipes"

    @property
    def sockets(self) -> Path:
        return self.path / "sockets"

    @property
    def overlay(self) -> Path:
        return self.path / "overlay"

    @property
    def log(self) -> Path:
        return self.path / "log"

    def log_tail(self, limit: int = 4096) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - limit))
            return file.read().decode("utf-8", errors="replace").strip() or "nothing"

    def create(self, user: int, group: int) -> None:
        """Create the folders; those that the sandbox may write belong to its user.

        Raises:
            OSError: The host has no space left, or this user lacks a right.
        """
        _make_enterable(self.path)
        self.pipes.mkdir()
        self.pipes.chmod(0o311)
        for folder in (self.sockets, self.overlay):
            folder.mkdir(mode=0o700)
            os.chown(folder, user, group)
        self.log.touch(mode=0o600)


class ServiceFolder:
    """Its lock shows that the service is alive."""

    def __init__(self, base: Path) -> None:
        """
        Raises:
            OSError: The folder cannot be made.
            SandboxConfigError: The file system cannot lock it.
        """
        self._numbers = count(1)
        while True:
            self.path = base / secrets.token_hex(NAME_BYTES)
            if (handle := _make_locked(self.path)) is not None:
                self._handle = handle
                return

    @property
    def name(self) -> str:
        return self.path.name

    def describe(self, groups: Iterable[str]) -> None:
        write_owner(self.path, groups)

    @property
    def intact(self) -> bool:
        """Whether the folder is still in its place: somebody may have emptied /tmp."""
        return is_still_at(self._handle, self.path)

    def new(self) -> RunFolder:
        """Return a folder that is not created yet."""
        return RunFolder(self.path / str(next(self._numbers)))

    def close(self) -> None:
        """Release the lock, after which anyone may sweep the rest. Call it once."""
        os.close(self._handle)


def _make_locked(path: Path) -> int | None:
    """Return None if the name is taken, or if a sweep was faster than the lock."""
    try:
        _make_enterable(path)
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


def _make_enterable(path: Path) -> None:
    """Create a folder that the users of sandboxes can enter but not list, whatever the umask is."""
    path.mkdir(mode=0o711)
    path.chmod(0o711)


def run_base(configured: Path | None) -> Path:
    """Return the folder of this user's services, and create it if needed.

    It is the configured one, or below XDG_RUNTIME_DIR, or in /tmp.

    Raises:
        SandboxConfigError: The folder cannot be made, other users can write to it, or its path is too long for sockets.
    """
    base = _choices(configured)[0]
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        _make_enterable(base)
    except FileExistsError:
        pass
    except OSError as error:
        raise SandboxConfigError(
            f"the folder {base} cannot be made: {error}", hint="set sandbox.run_dir to another folder"
        ) from error
    if not _is_private(base):
        raise SandboxConfigError(
            f"{base} is not a folder that only this user can write to",
            hint="remove it, or set sandbox.run_dir to another folder",
        )
    longest = base / LONGEST
    if len(os.fsencode(longest)) > SOCKET_PATH_LIMIT:
        raise SandboxConfigError(
            f"the path {base} is too long: {longest} exceeds the {SOCKET_PATH_LIMIT} bytes of a socket's path",
            hint="set sandbox.run_dir to a shorter path",
        )
    return base


def remember(state_dir: Path, base: Path) -> None:
    """Record for later sweeps that a service ran here: the setting may be different after a power cut.

    Raises:
        OSError: The state folder cannot be written.
    """
    notes = state_dir / NOTES
    notes.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        (notes / hashlib.sha256(os.fsencode(base)).hexdigest()[:16]).symlink_to(base.absolute())


def run_bases(configured: Path | None, state_dir: Path) -> list[Path]:
    """Return where services of this user run, ran, or would run by default."""
    notes = state_dir / NOTES
    noted = [note.readlink() for note in notes.iterdir() if note.is_symlink()] if notes.is_dir() else []
    return [base for base in dict.fromkeys([*_choices(configured), *noted]) if _is_private(base)]


def _choices(configured: Path | None) -> list[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    usable = runtime is not None and os.access(runtime, os.W_OK)
    return [
        *([configured] if configured is not None else []),
        *([Path(runtime) / "rs"] if runtime and usable else []),
        Path(f"/tmp/rs-{os.geteuid()}"),  # noqa: S108  checked before it is used
    ]


def _is_private(base: Path) -> bool:
    try:
        found = base.lstat()
    except OSError:  # it does not exist, or this user cannot look at it
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022

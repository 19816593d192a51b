"""The folder of one live sandbox on the host: short, since Unix sockets allow 107 bytes, and private.

pipes/    named pipes of processes; read-only inside, where it can be entered but not listed
sockets/  the kernel's sockets; writable inside
links/    hard links to these sockets, for the host alone
overlay/  what the sandbox writes         image  the image, as the launcher sees it
log       what the launcher says
"""

import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from sandboxes.errors import SandboxConfigError

SOCKET_PATH_LIMIT = 107
ID_BYTES = 5


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one sandbox and its parts."""

    path: Path

    @property
    def id(self) -> str:
        """The sandbox's id is the folder's name."""
        return self.path.name

    @property
    def pipes(self) -> Path:
        """See the module."""
        return self.path / "pipes"

    @property
    def sockets(self) -> Path:
        """See the module."""
        return self.path / "sockets"

    @property
    def links(self) -> Path:
        """See the module."""
        return self.path / "links"

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

    def said(self, limit: int = 4096) -> str:
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
        self.links.mkdir(mode=0o700)
        for folder in (self.sockets, self.overlay):
            folder.mkdir(mode=0o700)
            os.chown(folder, user, group)
        self.log.touch(mode=0o600)


def run_base(configured: Path | None) -> Path:
    """The folder of all sandboxes of this user: configured, or below XDG_RUNTIME_DIR, or in /tmp. Made if missing.

    Raises:
        SandboxConfigError: it is not this user's alone, or its path is too long for sockets.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if configured is not None:
        base = configured
    elif runtime and os.access(runtime, os.W_OK):
        base = Path(runtime) / "rs"
    else:
        base = Path(f"/tmp/rs-{os.geteuid()}")  # noqa: S108  checked below
    base.mkdir(mode=0o711, parents=True, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise SandboxConfigError(
            f"{base} is not a folder that only this user can write to",
            hint="remove it, or set sandbox.run_dir",
        )
    longest = base / ("0" * 2 * ID_BYTES) / "sockets" / "00000000-5"
    if len(os.fsencode(longest)) > SOCKET_PATH_LIMIT:
        raise SandboxConfigError(
            f"{base} is too long: {longest} has more than the {SOCKET_PATH_LIMIT} bytes of a socket's path",
            hint="set sandbox.run_dir to a shorter path",
        )
    return base


def new_run_folder(base: Path) -> RunFolder:
    """A name for a new sandbox; nothing is made yet."""
    return RunFolder(base / secrets.token_hex(ID_BYTES))

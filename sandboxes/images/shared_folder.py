"""A folder in which many processes, on one node or many, make things that take long, and remove them again.

Guarantees, on local disks and on shared file systems:
- An item is complete or not there: it is made in a draft, whose name no other process has, and then renamed.
- Correctness rests on unique names and renames alone. Locks only avoid duplicate work: on some shared file systems they
  hold for one node, or not at all.
- A draft whose maker died is removed: on the same machine at once, by the identity of its process; from another machine
  once it has shown no sign of life for `SILENT_SECONDS`.
- A stamp records when a node last used an item, so other nodes do not remove it. Ages are measured by the clock of the
  file system, because the clocks of nodes differ.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sandboxes.host.processes import boot_id, start_time
from sandboxes.reclaim.rmtree import remove_tree

HEARTBEAT_SECONDS = 30.0
SILENT_SECONDS = 15 * 60.0
STAMP_SECONDS = 60.0

NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
DRAFT = re.compile(r".+~(?P<machine>\w+-\d+)-(?P<pid>\d+)-(?P<start>\d+)-\w+")


class SharedFolder:
    """Drafts, locks and stamps below `root`. Its methods block."""

    def __init__(self, root: Path, *, remove: Callable[[Path], object] = remove_tree) -> None:
        """`remove` removes a folder whose files this user could not."""
        self.root = root
        self._remove = remove
        self.drafts = root / "drafts"
        self._locks = root / "locks"
        self._uses = root / "uses"
        self._stamped: dict[str, float] = {}
        self.locks_hold = True
        """Whether locks keep other processes of this node away; known after the first lock."""

    @contextmanager
    def draft(self, name: str) -> Iterator[Path]:
        """Create an empty folder that shows signs of life, and remove it after the block."""
        # A pid may be reused; with its start time it is unique for as long as the machine is up.
        mine = f"{_machine()}-{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(4)}"
        folder = self.drafts / f"{name}~{mine}"
        folder.mkdir(parents=True)
        stopped = threading.Event()
        heart = threading.Thread(target=_beat, args=(folder, stopped), daemon=True)
        heart.start()
        try:
            yield folder
        finally:
            stopped.set()
            heart.join()
            self._remove(folder)

    def remove_dead_drafts(self) -> list[Path]:
        dead = [path for path in self.drafts.glob("*~*") if self._dead(path)]
        for path in dead:
            self._remove(path)
        return dead

    def _dead(self, draft: Path) -> bool:
        found = DRAFT.fullmatch(draft.name)
        if found is not None and found["machine"] == _machine():
            return start_time(int(found["pid"])) != int(found["start"])
        with suppress(FileNotFoundError):
            return self.now() - draft.stat().st_mtime > SILENT_SECONDS
        return False

    @contextmanager
    def lock(self, name: str, *, wait: bool = True, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold a lock that the kernel releases when its holder dies. If locks do not work here, the block runs anyway.

        Raises:
            BlockingIOError: Another process holds the lock, and `wait` is false.
        """
        self._locks.mkdir(parents=True, exist_ok=True)
        with (self._locks / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                self.locks_hold = False
            yield

    def stamp(self, name: str) -> None:
        """Record that this node uses an item now, if the folder can be written to."""
        now = time.monotonic()
        if now - self._stamped.get(name, -STAMP_SECONDS) < STAMP_SECONDS:
            return
        with suppress(OSError):
            _touch(self._uses / name / _node())
            self._stamped[name] = now

    def last_used(self, name: str, *, elsewhere: bool = False) -> float:
        """Return when any node, or any other, last used an item: Unix time of the file system, 0 for never."""
        stamps = (path for path in (self._uses / name).glob("*") if not (elsewhere and path.name == _node()))
        return max((modified(path) for path in stamps), default=0.0)

    def discard(self, name: str) -> None:
        """Move an item away by one rename, so nobody finds half of it, and remove it there."""
        with self.draft(name) as draft:
            (self.root / name).rename(draft / "item")
        self.forget_uses(name)

    def forget_uses(self, name: str) -> None:
        self._stamped.pop(name, None)
        shutil.rmtree(self._uses / name, ignore_errors=True)

    def now(self) -> float:
        clock = self._uses / f".clock-{_node()}"
        _touch(clock)
        return clock.stat().st_mtime


def modified(path: Path) -> float:
    """Return when a file was last written to, as Unix time; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _beat(folder: Path, stopped: threading.Event) -> None:
    while not stopped.wait(HEARTBEAT_SECONDS):
        with suppress(OSError):
            os.utime(folder)


def _touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path)


def _machine() -> str:
    """Return an id of this boot of this machine and of this process's pid namespace."""
    namespace = re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))
    return f"{boot_id().replace('-', '')}-{namespace}"


def _node() -> str:
    """Return the host's name, made unique, because containers often share one."""
    name = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())[:64]
    return f"{name}-{boot_id()[:8]}"

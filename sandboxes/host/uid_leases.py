"""Lease a host user to each sandbox: no two live sandboxes share one, whichever service of the host started them.

The kernel then counts for each sandbox alone the resources that it counts by user (descriptors in flight, epoll
watches, inotify instances, pipes, keys, signals). A service that is root holds a block of ids by a lock on a file,
which ends with the service. It takes a block only if no process and no user of the host has one of its ids, so
processes that a dead service left behind keep theirs. An id is used again only after all others of the block, and only
if no process has it.
"""

import os
import pwd
import random
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from sandboxes.host.locks import is_still_at, try_lock
from sandboxes.host.subordinate_ids import ID_FILES, read_subordinate_ids

log = structlog.get_logger(__name__)

FOLDER = Path("/run/rollout-service-users")
BLOCK = 4096
ATTEMPTS = 64
"""Blocks to try before a service gives up; nearly all are free."""


@dataclass(frozen=True, slots=True)
class UserLease:
    number: int
    release: Callable[[], None]
    """Give it back once no process of the sandbox is left."""


class HostUsers:
    """Leases user ids from a range. The first use blocks for some milliseconds."""

    def __init__(self, numbers: range, folder: Path = FOLDER) -> None:
        self._range = numbers
        self.first = numbers.start
        self._folder = folder
        self._lock = threading.Lock()
        self._tried = False
        self._handle: int | None = None
        self._path: Path | None = None
        self._free: deque[int] = deque()
        self._used: deque[int] = deque()

    @property
    def available(self) -> bool:
        """The first use takes a block, and logs a warning if none is free."""
        with self._lock:
            if not self._tried:
                self._tried = True
                self._take_block()
            return self._handle is not None

    def lease(self) -> UserLease | None:
        """Return None if no id is left."""
        if not self.available:
            return None
        with self._lock:
            if not self._free:
                self._look_again()
            if not self._free:
                return None
            number = self._free.popleft()
        return UserLease(number, partial(self._used.append, number))

    def _look_again(self) -> None:
        living = users_of_processes()
        for _ in range(len(self._used)):
            number = self._used.popleft()
            (self._used if number in living else self._free).append(number)

    def close(self) -> None:
        """Give the block back; none is taken afterwards. Idempotent."""
        self._tried = True
        if self._handle is not None and self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._handle)
        self._handle = self._path = None
        self._free, self._used = deque(), deque()

    def _take_block(self) -> None:
        try:
            problem = self._problem()
        except OSError as error:
            problem = str(error)
        if problem is not None:
            log.warning("sandboxes share one user of the host", reason=problem)

    def _problem(self) -> str | None:
        """Acquire a block, or return why there is none."""
        if not covered_by_this_namespace(self._range):
            return "this user namespace does not have all ids of sandbox.user_range"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return f"{self._folder} is not a folder that only this user can use"
        self._remove_stale()
        return (
            None
            if any(self._take(first) for first in self._choices())
            else "no block of ids in sandbox.user_range is free"
        )

    def _remove_stale(self) -> None:
        for path in self._folder.iterdir():
            with suppress(OSError):
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if try_lock(handle) and is_still_at(handle, path):
                        path.unlink()
                finally:
                    os.close(handle)

    def _choices(self) -> Iterator[int]:
        """Yield the starts of blocks at random, because services in containers may share only the kernel.

        They are multiples of the block's size, so no two blocks overlap, whatever the ranges of two services are.
        """
        first = -(-self._range.start // BLOCK) * BLOCK
        blocks = range(first, self._range.stop - BLOCK + 1, BLOCK)
        yield from random.sample(blocks, min(ATTEMPTS, len(blocks)))

    def _take(self, first: int) -> bool:
        block = range(first, first + BLOCK)
        path = self._folder / str(first)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not try_lock(handle) or not is_still_at(handle, path):
            os.close(handle)
            return False
        self._handle, self._path, self._free = handle, path, deque(block)
        if is_taken(block):
            self.close()
        return self._handle is not None


def is_taken(block: range) -> bool:
    """Return whether a user, a range of subordinate ids, or a process of this host has one of the ids.

    A directory service is asked for the first id alone, because it need not list all of its users.
    """
    with suppress(KeyError):
        pwd.getpwuid(block.start)
        return True
    others = users_of_processes() | users_in_file()
    if any(number in block for number in others):
        return True
    ranges = (found.ids for file in ID_FILES for found in read_subordinate_ids(file))
    return any(block.start < ids.stop and ids.start < block.stop for ids in ranges)


def users_in_file(path: Path = Path("/etc/passwd")) -> set[int]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return {int(number) for number in re.findall(r"^[^:]*:[^:]*:(\d+):", text, re.MULTILINE)}


def users_of_processes() -> set[int]:
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (entry / "status").read_text(errors="replace")
            if said := re.search(r"^Uid:((?:\s+\d+)+)$", status, re.MULTILINE):
                found |= set(map(int, said[1].split()))
    return found


def covered_by_this_namespace(numbers: range) -> bool:
    """Return whether this user namespace has all of these ids; a container's may have fewer."""
    try:
        lines = Path("/proc/self/uid_map").read_text().split("\n")
    except OSError:
        return False
    maps = [tuple(map(int, line.split())) for line in lines if line]
    return any(inside <= numbers.start and numbers.stop <= inside + count for inside, _, count in maps)

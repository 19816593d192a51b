"""Reads a file or folder of a sandbox from the host's side, as a tar archive; nothing inside is run.

It runs by itself, as `python -I -S tree_reader.py PATH LIMIT [PID LAUNCHER]`, with the host's Python. PID is the first
process of the sandbox and LAUNCHER its parent; without them PATH is the host's own, for sandboxes that isolate nothing.

Guarantees:
- no program, library or setting of the sandbox is used: the tree is walked through descriptors below its root, and
  no link of it leads to the host's files, to /proc's links or out of the path;
- an entry is a folder, a regular file, a hard link to a file before it, or a symbolic link that stays within the path,
  wherever the archive is unpacked; all else is left out;
- modes keep their nine bits, with those that let the owner read; owners and attributes are dropped;
- what is read is no more than LIMIT, where each entry counts as the pages that it would take unpacked, so that sparse
  files count in full; the archive is no longer than twice that.

A sandbox belongs to another user namespace. It is entered, with the ids of the sandbox's own processes, before anything
of it is opened: files that their modes forbid to read can be read there, and nothing of the host can.
"""

# pathlib takes longer to import than all of this to run.
# ruff: noqa: PTH116, PTH123

import ctypes
import os
import stat
import sys
import tarfile
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO, NoReturn

MISSING, TOO_LARGE, ENDED = 44, 45, 46
"""Exit codes for these findings; `export` knows them."""
# From linux/openat2.h, linux/prctl.h and linux/capability.h.
SYS_OPENAT2, RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 437, 0x02, 0x10
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, CLONE_NEWUSER = 4, 8, 0x10000000
CAPABILITY_VERSION_3, ALL_CAPABILITIES = 0x20080522, 0xFFFFFFFF
PAGE = 4096
CHUNK = 1 << 18
MAX_DEPTH = 256
"""Each takes a descriptor."""
ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
OWNER_READS = {stat.S_IFDIR: 0o700, stat.S_IFREG: 0o600}

libc = ctypes.CDLL(None, use_errno=True)


class OpenHow(ctypes.Structure):
    """`struct open_how` of openat2(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


def checked(result: int, name: str) -> int:
    """The result of a function of the C library that answers -1 with errno where it fails."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def stop(code: int, message: str = "") -> "NoReturn":
    """End with an exit code and a line on standard error."""
    sys.stderr.write(message)
    sys.stderr.flush()
    os._exit(code)


def enter_user_namespace(pid: int) -> None:
    """Become one of the sandbox's own users, who has every right over its files and none over the host's."""
    ours, theirs = os.stat("/proc/self/ns/user"), os.stat(f"/proc/{pid}/ns/user")
    if ours.st_ino == theirs.st_ino:
        return
    if os.geteuid() == 0:
        os.setgroups([])
    namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    checked(libc.setns(namespace, CLONE_NEWUSER), "setns")
    os.close(namespace)
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        ids = {line.split()[0]: int(line.split()[1]) for line in file if line.startswith(("Uid:", "Gid:"))}
    checked(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl")
    os.setresgid(ids["Gid:"], ids["Gid:"], ids["Gid:"])
    os.setresuid(ids["Uid:"], ids["Uid:"], ids["Uid:"])
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    checked(libc.capget(header, sets), "capget")
    sets[0], sets[3] = sets[1], sets[4]  # effective is what is permitted
    checked(libc.capset(header, sets), "capset")
    checked(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def open_root(pid: int, launcher: int) -> int:
    """The root of a sandbox. Raises FileNotFoundError, ProcessLookupError where its first process has gone."""
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    # The launcher is the service's own child, so its number is not given to another process, and while it is
    # the parent of PID, that number is the sandbox's.
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
    found, host = os.fstat(root), os.stat("/")
    if parent != launcher or (found.st_dev, found.st_ino) == (host.st_dev, host.st_ino):
        raise ProcessLookupError
    return root


def open_below(root: int, path: str, flags: int) -> int:
    """Open a path as the sandbox would see it: `root` is the top, and links of /proc lead nowhere."""
    how = OpenHow(flags | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    name = ctypes.c_char_p(os.fsencode(path))
    return checked(
        libc.syscall(SYS_OPENAT2, root, name, ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))), path
    )


def stays_within(target: str, below: "list[str]", top: str) -> bool:
    """Whether a symbolic link leads to a place within the archive, whatever is made there later.

    `below` are the names from the top to the link's folder. It may go up at its beginning alone: the folders above a
    link are folders, while a name further on may be another link.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    if target.startswith("/"):
        names = [part for part in top.split("/") if part]
        return ".." not in parts and parts[: len(names)] == names
    ups = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    return ".." not in parts[ups:] and ups < len(below)


class Content:
    """A file that gives as many bytes as it is said to have: zeros where it holds fewer."""

    def __init__(self, file: "BinaryIO") -> None:
        self._file = file

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, exactly so many."""
        return self._file.read(size).ljust(size, b"\0")


class Archive:
    """Writes entries as they are found, and counts what they would take."""

    def __init__(self, limit: int, top: str) -> None:
        self._left = limit
        self._top = top
        """The path itself, as links name it."""
        self._files: dict[tuple[int, int], str] = {}
        self._tar = tarfile.open(  # noqa: SIM115  closed by `close`
            fileobj=sys.stdout.buffer,
            mode="w|",
            format=tarfile.GNU_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
            bufsize=CHUNK,
        )
        self._now = int(time.time())

    def close(self) -> None:
        """End the archive."""
        self._tar.close()
        sys.stdout.buffer.flush()

    def add(self, parent: int, name: str, below: "list[str]") -> None:
        """Add an entry of a folder, with all below it; `below` are the names that lead to the folder."""
        found = os.lstat(name, dir_fd=parent)
        entry = self._entry("/".join([*below, name]), found)
        if stat.S_ISDIR(found.st_mode):
            self._add_folder(entry, parent, name, below)
        elif stat.S_ISREG(found.st_mode):
            self._add_file(entry, parent, name, found)
        elif stat.S_ISLNK(found.st_mode):
            entry.linkname = os.readlink(name, dir_fd=parent)
            if below and stays_within(entry.linkname, below, self._top):
                entry.type = tarfile.SYMTYPE
                self._count(entry)
                self._tar.addfile(entry)

    def _entry(self, name: str, found: os.stat_result) -> tarfile.TarInfo:
        entry = tarfile.TarInfo(name)
        entry.mode = stat.S_IMODE(found.st_mode) & 0o777 | OWNER_READS.get(stat.S_IFMT(found.st_mode), 0)
        entry.mtime = min(max(0, int(found.st_mtime)), self._now)
        return entry

    def _count(self, entry: tarfile.TarInfo) -> None:
        """Count pages, also for what has no content: it takes memory of the kernel too. Names may be long."""
        self._left -= max(PAGE, -(-entry.size // PAGE) * PAGE) + len(entry.name) + len(entry.linkname)
        if self._left < 0:
            stop(TOO_LARGE, "it has more than the limit")

    def _add_folder(self, entry: tarfile.TarInfo, parent: int, name: str, below: "list[str]") -> None:
        try:
            folder = os.open(name, ENTER, dir_fd=parent)
        except OSError:
            return  # the user that reads has no right over it
        try:
            self._count(entry)
            entry.type = tarfile.DIRTYPE
            self._tar.addfile(entry)
            if len(below) >= MAX_DEPTH:
                stop(TOO_LARGE, f"its folders are nested more than {MAX_DEPTH} deep")
            for inner in self._names(folder):
                self.add(folder, inner, [*below, name])
        finally:
            os.close(folder)

    def _names(self, folder: int) -> "Iterator[str]":
        with os.scandir(folder) as entries:
            names = []
            for entry in entries:
                names.append(entry.name)
                if len(names) * PAGE > self._left:
                    stop(TOO_LARGE, "it has more entries than the limit allows")
        return iter(sorted(names))

    def _add_file(self, entry: tarfile.TarInfo, parent: int, name: str, found: os.stat_result) -> None:
        if (first := self._files.get((found.st_dev, found.st_ino))) is not None:
            entry.type, entry.linkname = tarfile.LNKTYPE, first
            self._count(entry)
            self._tar.addfile(entry)
            return
        try:
            file = open(os.open(name, READ, dir_fd=parent), "rb", buffering=CHUNK)  # noqa: SIM115
        except OSError:
            return  # the user that reads has no right over it
        with file:
            opened = os.fstat(file.fileno())
            if not stat.S_ISREG(opened.st_mode):
                return
            entry.size = opened.st_size
            self._count(entry)
            if found.st_nlink > 1:
                self._files[found.st_dev, found.st_ino] = entry.name
            self._tar.addfile(entry, Content(file))


def main(path: str, limit: int, pid: int, launcher: int) -> None:
    """Find the path and write the archive."""
    try:
        root = open_root(pid, launcher) if pid else os.open("/", os.O_PATH | os.O_CLOEXEC)
        if pid:
            enter_user_namespace(pid)
    except (FileNotFoundError, ProcessLookupError):
        stop(ENDED)
    above, _, name = path.rstrip("/").rpartition("/")
    try:
        folder = open_below(root, above or "/", os.O_PATH | os.O_DIRECTORY)
        os.lstat(name, dir_fd=folder)
    except OSError:
        stop(MISSING)  # also where links go in a ring, or lead to where nobody may go
    archive = Archive(limit, path.rstrip("/"))
    archive.add(folder, name, [])
    archive.close()


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[2:]]
    try:
        main(sys.argv[1], numbers[0], *(numbers[1:] or (0, 0)))
    except OSError as error:
        stop(1, str(error))

"""Read a file or folder of a sandbox from the host's side, as a tar archive, without running anything inside.

It runs on its own, as `python -I -S tree_reader.py PATH LIMIT [PID LAUNCHER]`, with the host's Python. PID is the first
process of the sandbox and LAUNCHER its parent. Without them PATH is on the host, for sandboxes without isolation.

Guarantees:
- No program, library or setting of the sandbox is used. The tree is walked through descriptors below its root, and no
  link in it leads to the host's files, through /proc's links, or out of the path.
- An entry is a folder, a regular file, a hard link to an earlier file, or a symbolic link that stays within the path
  wherever the archive is unpacked. Everything else is left out, including /proc and /sys.
- No path is longer than programs can open, and no folder is nested deeper than `MAX_DEPTH`.
- Modes keep their nine bits, plus those that let the owner read. Owners and attributes are dropped.
- No more than LIMIT is read. Each entry counts as the pages it would take unpacked, so sparse files count in full. The
  archive is at most twice as long.

The reader enters the sandbox's user namespace, with the ids of the sandbox's own processes, before it opens anything:
there it can read files whose modes forbid it, and nothing of the host.
"""

# pathlib and tarfile take longer to import than all of this to run.
# ruff: noqa: PTH116, PTH123

import ctypes
import os
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

MISSING, TOO_LARGE, ENDED = 44, 45, 46
"""Exit codes, which `export` interprets, also of `saved_files`."""
# From linux/openat2.h, linux/prctl.h and linux/capability.h.
SYS_OPENAT2, RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 437, 0x02, 0x10
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, CLONE_NEWUSER = 4, 8, 0x10000000
CAPABILITY_VERSION_3, ALL_CAPABILITIES = 0x20080522, 0xFFFFFFFF
# Types of archive entries, from the manual of GNU tar.
FILE, LINK, SYMLINK, FOLDER, LONG_NAME, LONG_LINK = b"0", b"1", b"2", b"5", b"L", b"K"
BLOCK, NAME_SIZE, END_BLOCKS = 512, 100, 2
PAGE = 4096
MAX_PATH = 4095
"""No program can open a longer path, and tar cannot make one."""
CHUNK = 1 << 18
MAX_DEPTH = 256
"""Each level takes a descriptor."""
ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
OWNER_READS = {stat.S_IFDIR: 0o700, stat.S_IFREG: 0o600}

libc = ctypes.CDLL(None, use_errno=True)


class OpenHow(ctypes.Structure):
    """`struct open_how` of openat2(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


def check(result: int, name: str) -> int:
    """Raise OSError from errno if the result of a C library function is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def stop(code: int, message: str = "") -> "NoReturn":
    sys.stderr.write(message)
    sys.stderr.flush()
    os._exit(code)


def enter_user_namespace(pid: int) -> None:
    """Become one of its users, with every right to its files and none to the host's."""
    ours, theirs = os.stat("/proc/self/ns/user"), os.stat(f"/proc/{pid}/ns/user")
    if ours.st_ino == theirs.st_ino:
        return
    if os.geteuid() == 0:
        os.setgroups([])
    namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    check(libc.setns(namespace, CLONE_NEWUSER), "setns")
    os.close(namespace)
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        ids = {line.split()[0]: int(line.split()[1]) for line in file if line.startswith(("Uid:", "Gid:"))}
    check(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl")
    os.setresgid(ids["Gid:"], ids["Gid:"], ids["Gid:"])
    os.setresuid(ids["Uid:"], ids["Uid:"], ids["Uid:"])
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    check(libc.capget(header, sets), "capget")
    sets[0], sets[3] = sets[1], sets[4]  # effective is what is permitted
    check(libc.capset(header, sets), "capset")
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def open_root(pid: int, launcher: int) -> int:
    """
    Raises:
        FileNotFoundError, ProcessLookupError: The sandbox's first process has ended.
    """
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
    """Open a path as the sandbox would see it, without following links of /proc."""
    how = OpenHow(flags | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    name = ctypes.c_char_p(os.fsencode(path))
    return check(libc.syscall(SYS_OPENAT2, root, name, ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))), path)


def stays_within(target: str, below: "list[str]", top: str) -> bool:
    """Return whether a symbolic link leads to a place within the archive, whatever is made there later.

    `below` are the names from the top to the link's folder. The target may go up only at its beginning: the parents of
    a link are folders, but a later name may be another link.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    if target.startswith("/"):
        names = [part for part in top.split("/") if part]
        return ".." not in parts and parts[: len(names)] == names
    ups = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    return ".." not in parts[ups:] and ups < len(below)


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def encode_number(value: int, width: int) -> bytes:
    """Use octal digits, or plain bytes if there would be too many digits."""
    if value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    return b"\x80" + value.to_bytes(width - 1, "big")


def make_header(name: bytes, kind: bytes, mode: int, size: int, mtime: int, link: bytes) -> bytes:
    start = name[:NAME_SIZE].ljust(NAME_SIZE, b"\0") + encode_number(mode, 8) + encode_number(0, 8) * 2
    start += encode_number(size, 12) + encode_number(mtime, 12)
    end = (kind + link[:NAME_SIZE].ljust(NAME_SIZE, b"\0") + b"ustar  ").ljust(BLOCK - len(start) - 8, b"\0")
    checksum = sum(start) + sum(end) + 8 * ord(" ")
    return start + b"%06o\0 " % checksum + end


def names_in(folder: int, limit: int) -> "list[str]":
    with os.scandir(folder) as entries:
        names = []
        for entry in entries:
            names.append(entry.name)
            if len(names) * PAGE > limit:
                stop(TOO_LARGE, "it has more entries than the limit allows")
    return sorted(names)


class Entry:
    def __init__(self, name: str, found: os.stat_result, now: int) -> None:
        self.name = os.fsencode(name)
        self.kind = FILE
        self.mode = stat.S_IMODE(found.st_mode) & 0o777 | OWNER_READS.get(stat.S_IFMT(found.st_mode), 0)
        self.mtime = min(max(0, int(found.st_mtime)), now)
        self.size = 0
        self.link = b""

    def header(self) -> bytes:
        """Make separate members of long names."""
        found = b""
        name = self.name + b"/" if self.kind == FOLDER else self.name
        for kind, text in ((LONG_LINK, self.link), (LONG_NAME, name)):
            if len(text) > NAME_SIZE:
                found += make_header(b"././@LongLink", kind, 0, len(text) + 1, 0, b"") + pad(text + b"\0")
        return found + make_header(name, self.kind, self.mode, self.size, self.mtime, self.link)


class Archive:
    def __init__(self, limit: int, top: str, kernel: "set[int]") -> None:
        self._left = limit
        self._top = top
        """The path itself, as links refer to it."""
        self._above = len(os.fsencode(top.rpartition("/")[0])) + 1
        self._kernel = kernel
        self._files: dict[tuple[int, int], bytes] = {}
        self._out = open(1, "wb", buffering=CHUNK, closefd=False)  # noqa: SIM115  closed by `close`
        self._now = int(time.time())

    def close(self) -> None:
        self._out.write(bytes(END_BLOCKS * BLOCK))
        self._out.close()

    def add(self, parent: int, name: str, below: "list[str]") -> None:
        """Add everything below the entry too; `below` are the names that lead to its folder."""
        try:
            found = os.lstat(name, dir_fd=parent)
            target = os.readlink(name, dir_fd=parent) if stat.S_ISLNK(found.st_mode) else ""
        except OSError:
            if not below:
                raise
            return  # a process inside has removed or replaced it meanwhile
        if found.st_dev in self._kernel:
            return
        entry = Entry("/".join([*below, name]), found, self._now)
        if stat.S_ISDIR(found.st_mode):
            self._add_folder(entry, parent, name, below)
        elif stat.S_ISREG(found.st_mode):
            self._add_file(entry, parent, name, found)
        elif stat.S_ISLNK(found.st_mode) and below and stays_within(target, below, self._top):
            entry.kind, entry.link = SYMLINK, os.fsencode(target)
            self._begin(entry)

    def _begin(self, entry: Entry) -> None:
        """Count an entry without content as a page: it takes kernel memory too."""
        if self._above + len(entry.name) > MAX_PATH:
            stop(TOO_LARGE, f"a path in it is longer than {MAX_PATH} bytes")
        self._left -= max(PAGE, -(-entry.size // PAGE) * PAGE) + len(entry.name) + len(entry.link)
        if self._left < 0:
            stop(TOO_LARGE, "the content exceeds the limit")
        self._out.write(entry.header())

    def _add_folder(self, entry: Entry, parent: int, name: str, below: "list[str]") -> None:
        try:
            folder = os.open(name, ENTER, dir_fd=parent)
        except OSError:
            return  # the user that reads has no right over it
        try:
            entry.kind = FOLDER
            self._begin(entry)
            if len(below) >= MAX_DEPTH:
                stop(TOO_LARGE, f"its folders are nested more than {MAX_DEPTH} levels deep")
            for inner in names_in(folder, self._left):
                self.add(folder, inner, [*below, name])
        finally:
            os.close(folder)

    def _add_file(self, entry: Entry, parent: int, name: str, found: os.stat_result) -> None:
        if (first := self._files.get((found.st_dev, found.st_ino))) is not None:
            entry.kind, entry.link = LINK, first
            self._begin(entry)
            return
        try:
            file = os.open(name, READ, dir_fd=parent)
        except OSError:
            return  # the user that reads has no right over it
        try:
            opened = os.fstat(file)
            if stat.S_ISREG(opened.st_mode):
                entry.size = opened.st_size
                self._begin(entry)
                if found.st_nlink > 1:
                    self._files[found.st_dev, found.st_ino] = entry.name
                self._copy(file, entry.size)
        finally:
            os.close(file)

    def _copy(self, file: int, size: int) -> None:
        """Write as many bytes as were announced, with zeros for those the file no longer has."""
        left = size
        while left:
            asked = min(left, CHUNK)
            part = os.read(file, asked) or bytes(asked)
            self._out.write(part)
            left -= len(part)
        self._out.write(bytes(-size % BLOCK))


def find_kernel_devices(root: int) -> "set[int]":
    """Find the kernel's own file systems, whose files are nobody's work."""
    devices = set()
    for name in ("proc", "sys"):
        try:
            devices.add(os.lstat(name, dir_fd=root).st_dev)
        except OSError:
            continue
    return devices - {os.fstat(root).st_dev}


def main(path: str, limit: int, pid: int, launcher: int) -> None:
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
        stop(MISSING)  # also for links in a loop, and links to where nobody may go
    archive = Archive(limit, path.rstrip("/"), find_kernel_devices(root))
    archive.add(folder, name, [])
    archive.close()


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[2:]]
    try:
        main(sys.argv[1], numbers[0], *(numbers[1:] or (0, 0)))
    except OSError as error:
        stop(1, str(error))

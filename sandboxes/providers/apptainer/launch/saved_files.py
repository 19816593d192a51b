"""The files that a sandbox wrote, as an archive from which another one begins: the upper layer of its overlay.

`save` runs on its own, as `python -I -S -c COMMAND LAUNCHER SPACE LIMIT`. LAUNCHER is the process that made the
mounts; SPACE is the folder of the sandbox's files. `restore` runs in the launcher of the other sandbox, before its
overlay is mounted.

Guarantees:
- Nothing of the sandbox is run. The tree is walked through descriptors, and no link in it is followed.
- The archive has folders, files, hard and symbolic links, named pipes, and the overlay's notes on what hides the image:
  whiteouts, opaque folders and renamed ones. Modes, times and attributes of users are kept; owners are not, since all
  files of a sandbox are one user's. Sockets are left out.
- No more than LIMIT is read; each entry counts as the pages that it takes, with its attributes.
- `restore` makes nothing outside the folder that is its root.
"""

import os
import stat
import sys
import tarfile

from sandboxes.host.kernel_calls import CLONE_NEWNS, CLONE_NEWUSER, call
from sandboxes.runtime.tree_reader import ENDED, ENTER, MAX_DEPTH, PAGE, READ, TOO_LARGE, names_in, stop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

TOP = "files"
NOTES = ("opaque", "redirect")
"""An overlay's attributes without which other files would be seen. The rest keeps inode numbers stable."""
NOTE, ATTRIBUTE = "ROLLOUT.overlay.", "ROLLOUT.attribute."
"""Prefixes in the archive's headers, also for attributes of users, whose names, like all values, are in hexadecimal
digits.
"""
TIME = "ROLLOUT.mtime"
DIGITS = 4
"""Bytes of a value whose digits follow each other: Python before 3.11.10 and 3.12.6 takes the square of the time."""


def enter(launcher: int) -> str:
    """Enter the launcher's namespaces; return the prefix of the overlay's attributes there."""
    kinds = [("mnt", CLONE_NEWNS)]
    own_users = os.stat("/proc/self/ns/user").st_ino != os.stat(f"/proc/{launcher}/ns/user").st_ino
    if own_users:
        kinds.insert(0, ("user", CLONE_NEWUSER))
    spaces = [(os.open(f"/proc/{launcher}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC), kind) for name, kind in kinds]
    for space, kind in spaces:
        call("setns", space, kind)
        os.close(space)
    return overlay_prefix(privileged=not own_users)


def overlay_prefix(*, privileged: bool) -> str:
    """Return the prefix of the overlay's attributes: only the host's root may set the trusted ones."""
    return "trusted.overlay." if privileged else "user.overlay."


class Saver:
    def __init__(self, archive: tarfile.TarFile, limit: int, prefix: str) -> None:
        self._archive = archive
        self._left = limit
        self._prefix = prefix
        self._files: dict[tuple[int, int], str] = {}

    def add_folder(self, folder: int, name: str, depth: int = 0) -> None:
        if depth > MAX_DEPTH:
            stop(TOO_LARGE, f"folders are nested more than {MAX_DEPTH} levels deep")
        entry = self._entry(name, os.fstat(folder), tarfile.DIRTYPE)
        self._note_attributes(entry, folder)
        self._begin(entry)
        for inner in names_in(folder, self._left):
            self._add(folder, inner, f"{name}/{inner}", depth)

    def _add(self, parent: int, inner: str, name: str, depth: int) -> None:
        found = os.lstat(inner, dir_fd=parent)
        if stat.S_ISDIR(found.st_mode):
            folder = os.open(inner, ENTER, dir_fd=parent)
            try:
                self.add_folder(folder, name, depth + 1)
            finally:
                os.close(folder)
        elif stat.S_ISREG(found.st_mode):
            self._add_file(parent, inner, name, found)
        elif stat.S_ISLNK(found.st_mode):
            entry = self._entry(name, found, tarfile.SYMTYPE)
            entry.linkname = os.readlink(inner, dir_fd=parent)
            self._begin(entry)
        elif stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:  # a whiteout
            self._begin(self._entry(name, found, tarfile.CHRTYPE))
        elif stat.S_ISFIFO(found.st_mode):
            self._begin(self._entry(name, found, tarfile.FIFOTYPE))

    def _add_file(self, parent: int, inner: str, name: str, found: os.stat_result) -> None:
        first = self._files.get((found.st_dev, found.st_ino))
        if first is not None:
            entry = self._entry(name, found, tarfile.LNKTYPE)
            entry.linkname = first
            self._begin(entry)
            return
        with open(os.open(inner, READ, dir_fd=parent), "rb") as file:
            opened = os.fstat(file.fileno())
            if not stat.S_ISREG(opened.st_mode):
                return  # it was replaced meanwhile
            entry = self._entry(name, opened, tarfile.REGTYPE)
            entry.size = opened.st_size
            self._note_attributes(entry, file.fileno())
            self._begin(entry, file)
        if found.st_nlink > 1:
            self._files[found.st_dev, found.st_ino] = name

    @staticmethod
    def _entry(name: str, found: os.stat_result, kind: bytes) -> tarfile.TarInfo:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = kind, stat.S_IMODE(found.st_mode)
        entry.pax_headers = {TIME: str(found.st_mtime_ns)}  # the usual header would round it
        return entry

    def _begin(self, entry: tarfile.TarInfo, content: "BinaryIO | None" = None) -> None:
        self._take(max(PAGE, -(-entry.size // PAGE) * PAGE))
        self._archive.addfile(entry, content)
        # It would keep all entries, and what the sandbox attached to them.
        self._archive.members.clear()  # type: ignore[attr-defined]  # public, and not in typeshed

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            stop(TOO_LARGE, "the files exceed the limit")

    def _note_attributes(self, entry: tarfile.TarInfo, descriptor: int) -> None:
        for attribute in os.listxattr(descriptor):
            key = None
            if attribute.startswith(self._prefix):
                name = attribute.removeprefix(self._prefix)
                key = NOTE + name if name in NOTES else None
            elif attribute.startswith("user.") and not attribute.startswith("user.overlay."):
                key = ATTRIBUTE + os.fsencode(attribute).hex()
            if key is not None:
                value = os.getxattr(descriptor, attribute).hex(" ", DIGITS)
                self._take(len(key) + len(value))
                entry.pax_headers = {**entry.pax_headers, key: value}


def restore(archive: "BinaryIO", user: int, group: int, prefix: str) -> None:
    """Put the files in the root of this process, which nobody else may change.

    They will belong to `user` and `group`; `prefix` begins the attributes of their overlay.
    """
    folders = []
    with tarfile.open(fileobj=archive, mode="r:") as members:
        while (entry := members.next()) is not None:
            members.members.clear()  # type: ignore[attr-defined]  # as above
            top, _, inner = entry.name.partition("/")
            if top != TOP:
                continue
            path = f"/{inner}"
            make(members, entry, path)
            os.chown(path, user, group, follow_symlinks=False)
            if entry.isdir():
                folders.append((path, entry))  # its mode may keep its own files from being made
            elif not entry.issym():
                finish(path, entry, prefix)
            else:
                set_time(path, entry)
    for path, entry in reversed(folders):
        finish(path, entry, prefix)


def make(members: tarfile.TarFile, entry: tarfile.TarInfo, path: str) -> None:
    if entry.isdir():
        if path != "/":
            os.mkdir(path, 0o700)
    elif entry.issym():
        os.symlink(entry.linkname, path)
    elif entry.islnk():
        os.link(f"/{entry.linkname.partition('/')[2]}", path)
    elif entry.ischr():
        os.mknod(path, stat.S_IFCHR)
    elif entry.isfifo():
        os.mkfifo(path)
    else:
        content = members.extractfile(entry)
        with open(path, "xb") as file:
            while content is not None and (part := content.read(1 << 18)):
                file.write(part)


def finish(path: str, entry: tarfile.TarInfo, prefix: str) -> None:
    if entry.ischr():
        return  # a whiteout has none
    for key, value in entry.pax_headers.items():
        if key.startswith(NOTE):
            os.setxattr(path, prefix + key.removeprefix(NOTE), bytes.fromhex(value))
        elif key.startswith(ATTRIBUTE):
            os.setxattr(path, bytes.fromhex(key.removeprefix(ATTRIBUTE)), bytes.fromhex(value))
    os.chmod(path, entry.mode)
    set_time(path, entry)


def set_time(path: str, entry: tarfile.TarInfo) -> None:
    """Links are not followed."""
    moment = int(entry.pax_headers[TIME])
    os.utime(path, ns=(moment, moment), follow_symlinks=False)


def save(launcher: int, space: str, limit: int) -> None:
    try:
        prefix = enter(launcher)
        folder = os.open(f"{space}/data/upper", ENTER)
    except (FileNotFoundError, ProcessLookupError) as error:
        stop(ENDED, str(error))
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        Saver(archive, limit, prefix).add_folder(folder, TOP)


def main() -> None:
    try:
        save(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    except OSError as error:
        stop(1, str(error))

"""Reads and writes the files of an image, as archives: the work of COPY and ADD, once the image is the root."""

import fnmatch
import os
import posixpath
import sys
import tarfile

from . import StepError
from .accounts import ImageUser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


class Writer:
    """Unpacks a tar archive whose names begin with "f/" (a file) or "d" (in a folder)."""

    def __init__(self, job: "dict[str, Any]") -> None:
        self._dest = posixpath.join(job["cwd"], job["dest"])
        self._into = job["many"] or job["dest"].endswith("/") or job["dest"] in {".", ".."}
        self._mode = int(job["mode"], 8) if job["mode"] else None
        owner = ImageUser(job["owner"], groups=False) if job["owner"] else None
        self._owner = (owner.user, owner.group) if owner else None

    def run(self) -> int:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|", errorlevel=2) as archive:
            archive.extraction_filter = lambda member, _path: member
            for member in archive:
                self._write(archive, member)
                archive.members.clear()  # type: ignore[attr-defined]  # otherwise all of them are kept
        return 0

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        kind, _, rest = member.name.partition("/")
        target = self._target(kind, rest)
        if self._owner:
            member.uid, member.gid = self._owner
        if self._mode is not None and not member.issym():
            member.mode = self._mode
        self._make_parents(posixpath.dirname(target))
        if member.isdir() and os.path.isdir(target):
            if kind == "d" and rest and rest != ".":
                self._set(member, target)
            return
        if os.path.lexists(target):
            if member.isdir():
                raise StepError(f"{target} is a file, and cannot be replaced by a folder")
            if os.path.isdir(target) and not os.path.islink(target):
                raise StepError(f"{target} is a folder, and cannot be replaced by a file")
            os.unlink(target)
        if member.islnk():
            member.linkname = self._target(*member.linkname.partition("/")[::2]).lstrip("/")
        member.name = target.lstrip("/")
        if member.isdev():
            return  # a container's own /dev has what is needed
        archive.extract(member, "/", numeric_owner=True)

    def _target(self, kind: str, rest: str) -> str:
        if kind == "d":
            return posixpath.normpath(posixpath.join(self._dest, rest))
        into = self._into or os.path.isdir(self._dest)
        return posixpath.normpath(posixpath.join(self._dest, rest) if into else self._dest)

    def _make_parents(self, path: str) -> None:
        """Give missing folders to the owner of the copied files."""
        if os.path.isdir(path):
            return
        self._make_parents(posixpath.dirname(path))
        os.mkdir(path, 0o755)
        if self._owner:
            os.chown(path, *self._owner)

    @staticmethod
    def _set(member: tarfile.TarInfo, target: str) -> None:
        if not os.path.islink(target):
            os.chown(target, member.uid, member.gid)
            os.chmod(target, member.mode)


def send_files(sources: "list[str]") -> int:
    """Write an archive for a `Writer` to standard output. A link that is named itself is followed."""
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for source in sources:
            found = sorted(matches("/", [part for part in source.split("/") if part not in {"", "."}]))
            if not found:
                raise StepError(f"{source} is not there")
            for path in found:
                send_path(archive, path)
    sys.stdout.buffer.flush()
    return 0


def matches(folder: str, parts: "list[str]") -> "Iterator[str]":
    if not parts:
        yield folder
        return
    part = parts[0]
    if not any(sign in part for sign in "*?["):
        if os.path.lexists(posixpath.join(folder, part)):
            yield from matches(posixpath.join(folder, part), parts[1:])
        return
    pattern = part.replace("[^", "[!")
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        if fnmatch.fnmatchcase(name, pattern):
            yield from matches(posixpath.join(folder, name), parts[1:])


def send_path(archive: tarfile.TarFile, path: str) -> None:
    """Add a file as "f/NAME", or the contents of a folder as "d/..."."""
    real = os.path.realpath(path)
    if not os.path.isdir(real):
        archive.add(real, f"f/{posixpath.basename(path)}", recursive=False)
        return
    archive.add(real, "d", recursive=False)
    for folder, folders, names in os.walk(real):
        folders.sort()
        for name in sorted([*folders, *names]):
            full = posixpath.join(folder, name)
            archive.add(full, f"d/{posixpath.relpath(full, real)}", recursive=False)

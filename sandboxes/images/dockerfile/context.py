"""The files that a build may copy: those of one folder, without the paths that its .dockerignore excludes.

A link in the folder never leads out. The digest, which decides whether a layer can be used again, counts names, modes,
links and contents, but no times and no owners.
"""

import hashlib
import io
import json
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from sandboxes.errors import ImageError, ImageNotFoundError
from sandboxes.images.tree import ImageTree

IGNORE = ".dockerignore"
PART = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ContextFile:
    name: str
    path: Path | None
    text: bytes = b""


class IgnoreRules:
    """The patterns of a .dockerignore: the last one that matches a path, or a folder above it, decides."""

    def __init__(self, text: str = "") -> None:
        lines = (line.strip() for line in text.removeprefix("\ufeff").splitlines() if not line.startswith("#"))
        self._rules = [(not line.startswith("!"), _compile(line.removeprefix("!").strip())) for line in lines if line]
        self.has_exceptions = any(not ignored for ignored, _ in self._rules)
        """Whether something below an ignored folder may be wanted all the same."""

    def ignores(self, path: str) -> bool:
        """`path` is relative to the context."""
        parts = path.split("/")
        prefixes = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        decided = False
        for ignored, pattern in self._rules:
            if decided != ignored and any(pattern.fullmatch(prefix) for prefix in prefixes):
                decided = ignored
        return decided


class BuildContext:
    def __init__(self, root: Path, dockerfile: Path | None = None) -> None:
        """The rules are those beside the Dockerfile (`NAME.dockerignore`) if there are any, else those of the folder.

        Raises:
            ImageNotFoundError: The context is not a folder.
        """
        if not root.is_dir():
            raise ImageNotFoundError(f"the context {root} is not a folder", hint="name a folder as --context")
        self._tree = ImageTree(root)
        named = [dockerfile.with_name(f"{dockerfile.name}{IGNORE}")] if dockerfile is not None else []
        file = next((path for path in [*named, root / IGNORE] if path.is_file()), None)
        self._rules = IgnoreRules(file.read_text(errors="surrogateescape") if file is not None else "")

    def select(self, sources: Sequence[str], *, unpack: bool = False) -> list[ContextFile]:
        """Return the selected files: files as "f/NAME", the contents of folders as "d/...", archives as "a/NAME".

        Args:
            sources: paths or patterns, relative to the context; ".." does not lead out of it.
            unpack: whether archives are to be unpacked, as ADD does.

        Raises:
            ImageNotFoundError: A source matches nothing, or everything that it matches is ignored.
        """
        found: list[ContextFile] = []
        for source in sources:
            paths = sorted(self._matches("", _parts(source)))
            files = [file for path in paths for file in self._files(path, unpack=unpack)]
            if not files:
                ignored = f", or {IGNORE} leaves it out" if self._rules.ignores("/".join(_parts(source))) else ""
                raise ImageNotFoundError(
                    f"{source!r} is not in the context{ignored}", hint=f"the context is {self._tree.root}"
                )
            found += files
        return found

    def _matches(self, folder: str, parts: list[str]) -> Iterator[str]:
        if not parts:
            yield folder
            return
        part = parts[0]
        if any(sign in part for sign in "*?["):
            names = [name for name in self._tree.names(f"/{folder}") if fnmatchcase(name, part.replace("[^", "[!"))]
        else:
            names = [part]
        for name in names:
            path = posixpath.join(folder, name)
            if self._tree.find(f"/{path}") is not None:
                yield from self._matches(path, parts[1:])

    def _files(self, path: str, *, unpack: bool) -> Iterator[ContextFile]:
        """Yield a file, or everything below a folder. A link is followed only if it is named itself."""
        inside = self._tree.find(f"/{path}") or "/"
        real, relative = self._tree.host(inside), inside.lstrip("/")
        if not real.is_dir():
            if not self._rules.ignores(relative):
                kind = "a" if unpack and _is_archive(real) else "f"
                yield ContextFile(f"{kind}/{posixpath.basename(path)}", real)
            return
        yield ContextFile("d", real)
        for folder, folders, names in os.walk(real):
            folders.sort()
            here = posixpath.relpath(folder, real)
            for name in sorted([*folders, *names]):
                below = posixpath.normpath(posixpath.join(here, name))
                if self._rules.ignores(posixpath.normpath(posixpath.join(relative, below))):
                    if name in folders and not self._rules.has_exceptions:
                        folders.remove(name)
                    continue
                yield ContextFile(f"d/{below}", Path(folder, name))


def digest(files: Iterable[ContextFile]) -> str:
    """
    Raises:
        ImageError: A file cannot be read.
    """
    whole = hashlib.sha256()
    for file in files:
        about: list[object] = [file.name]
        if file.path is None:
            about.append(hashlib.sha256(file.text).hexdigest())
        else:
            about += _describe(file.path)
        whole.update(json.dumps(about).encode() + b"\n")
    return whole.hexdigest()


def send(files: Iterable[ContextFile], pipe: IO[bytes]) -> None:
    """Write an archive of files that belong to root; those of unpacked archives keep their owners.

    Raises:
        ImageError: A file cannot be read.
    """
    with tarfile.open(fileobj=pipe, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for file in files:
            if file.path is None:
                archive.addfile(_member(file.name, tarfile.REGTYPE, 0o644, len(file.text)), io.BytesIO(file.text))
            elif file.name.startswith("a/"):
                _send_unpacked(file.path, archive)
            else:
                _send_file(file, file.path, archive)


def send_tree(root: Path, pipe: IO[bytes]) -> None:
    with tarfile.open(fileobj=pipe, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        archive.add(root, "d")


def _parts(source: str) -> list[str]:
    return [part for part in posixpath.normpath(f"/{source}").split("/") if part]


def _is_archive(path: Path) -> bool:
    try:
        return path.is_file() and tarfile.is_tarfile(path)
    except OSError:
        return False


def _describe(path: Path) -> list[object]:
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            return ["link", os.fsencode(path.readlink()).hex()]
        if not stat.S_ISREG(status.st_mode):
            return [stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode)]
        with path.open("rb") as file:
            return ["file", stat.S_IMODE(status.st_mode), hashlib.file_digest(file, "sha256").hexdigest()]
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}") from error


def _member(name: str, kind: bytes, mode: int, size: int = 0, mtime: float = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size, member.mtime = kind, mode, size, mtime
    return member


def _send_file(file: ContextFile, path: Path, archive: tarfile.TarFile) -> None:
    try:
        status = path.lstat()
        mode, when = stat.S_IMODE(status.st_mode), status.st_mtime
        if stat.S_ISLNK(status.st_mode):
            member = _member(file.name, tarfile.SYMTYPE, 0o777, mtime=when)
            member.linkname = str(path.readlink())
            archive.addfile(member)
        elif stat.S_ISDIR(status.st_mode):
            archive.addfile(_member(file.name, tarfile.DIRTYPE, mode, mtime=when))
        elif stat.S_ISREG(status.st_mode):
            with path.open("rb") as content:
                archive.addfile(_member(file.name, tarfile.REGTYPE, mode, status.st_size, when), content)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror or error}") from error


def _send_unpacked(path: Path, archive: tarfile.TarFile) -> None:
    try:
        with tarfile.open(path) as packed:
            for member in packed:
                member.name = f"d/{posixpath.normpath('/' + member.name).lstrip('/')}"
                if member.islnk():
                    member.linkname = f"d/{posixpath.normpath('/' + member.linkname).lstrip('/')}"
                archive.addfile(member, packed.extractfile(member) if member.isreg() else None)
    except tarfile.TarError as error:
        raise ImageError(f"cannot unpack {path}: {error}") from error


def _compile(pattern: str) -> re.Pattern[str]:
    """Let `*` and `?` match within a name, and `**` any number of folders."""
    cleaned = posixpath.normpath(pattern).lstrip("/")
    made, at = "", 0
    while at < len(cleaned):
        if cleaned.startswith("**/", at):
            made, at = made + "(?:.*/)?", at + 3
        elif cleaned.startswith("**", at):
            made, at = made + ".*", at + 2
        elif cleaned[at] == "*":
            made, at = made + "[^/]*", at + 1
        elif cleaned[at] == "?":
            made, at = made + "[^/]", at + 1
        elif cleaned[at] == "[" and (end := cleaned.find("]", at + 2)) > 0:
            inner = cleaned[at + 1 : end].replace("\\", "\\\\")
            made, at = made + f"[{inner}]", end + 1
        else:
            at += cleaned[at] == "\\" and at + 1 < len(cleaned)
            made, at = made + re.escape(cleaned[at]), at + 1
    return re.compile(made, re.DOTALL)

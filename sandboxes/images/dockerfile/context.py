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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO

from sandboxes.errors import ImageError, ImageNotFoundError
from sandboxes.images.tree import ImageTree

IGNORE = ".dockerignore"
PART = 1024 * 1024
HEADER_BYTES = 1024 * 1024
HEADERS = frozenset(
    {*(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE), tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
)


@dataclass(frozen=True, slots=True)
class ContextFile:
    name: str
    path: Path | None
    text: bytes = b""


class IgnoreRules:
    """The patterns of a .dockerignore: the last one that matches a path, or a folder above it, decides."""

    def __init__(self, text: str = "") -> None:
        lines = (line.strip() for line in text.removeprefix("\ufeff").splitlines() if not line.startswith("#"))
        self._rules = [(not line.startswith("!"), _matcher(line.removeprefix("!").strip())) for line in lines if line]
        self.has_exceptions = any(not ignored for ignored, _ in self._rules)
        """Whether something below an ignored folder may be wanted all the same."""

    def ignores(self, path: str) -> bool:
        """`path` is relative to the context."""
        parts = path.split("/")
        prefixes = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        decided = False
        for ignored, matches in self._rules:
            if decided != ignored and any(map(matches, prefixes)):
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


class _BoundedInfo(tarfile.TarInfo):
    """Refuses headers that would be read into memory as a whole, which a small archive can have of any size."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in HEADERS and self.size > HEADER_BYTES:
            raise tarfile.ReadError(f"it has a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]

    def _refuse(self, *_: object) -> tarfile.TarInfo:
        raise tarfile.ReadError("it has sparse files, whose maps may have any length")

    _proc_sparse = _proc_gnusparse_10 = _refuse


def _is_archive(path: Path) -> bool:
    if not path.is_file():  # opening a named pipe would wait for its other end
        return False
    try:
        with tarfile.open(path, tarinfo=_BoundedInfo):
            return True
    except (OSError, tarfile.TarError):
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
        with tarfile.open(path, tarinfo=_BoundedInfo) as packed:
            for member in packed:
                for one in (packed, archive):
                    one.members.clear()  # type: ignore[attr-defined]  # otherwise all of them are kept
                member.name = f"d/{posixpath.normpath('/' + member.name).lstrip('/')}"
                if member.islnk():
                    member.linkname = f"d/{posixpath.normpath('/' + member.linkname).lstrip('/')}"
                archive.addfile(member, packed.extractfile(member) if member.isreg() else None)
    except tarfile.TarError as error:
        raise ImageError(f"cannot unpack {path}: {error}") from error


FOLDERS, ANY, NAME = "(?:.*/)?", ".*", "[^/]*"
"""The wildcards `**/`, `**` and `*`."""
FEW = 2
"""The most wildcards that `re` takes: its time grows with a power of their number."""


def _matcher(pattern: str) -> Callable[[str], object]:
    """Let `*` and `?` match within a name, and `**` any number of folders.

    Raises:
        ImageError: The pattern is none, such as `[z-a]`.
    """
    try:
        return _compile(pattern)
    except re.error as error:
        raise ImageError(f"{IGNORE}: {pattern!r} is not a pattern: {error}", hint="correct that line") from error


def _compile(pattern: str) -> Callable[[str], object]:
    tokens = list(_tokens(posixpath.normpath(pattern).lstrip("/")))
    if sum(token in (FOLDERS, ANY, NAME) for token in tokens) <= FEW:
        return re.compile("".join(tokens), re.DOTALL).fullmatch
    return partial(_matches, [(token, re.compile(token, re.DOTALL)) for token in tokens])


def _tokens(cleaned: str) -> Iterator[str]:
    """Yield a regular expression for each wildcard, and for each other character."""
    at = 0
    while at < len(cleaned):
        if cleaned.startswith("**/", at):
            token, length = FOLDERS, 3
        elif cleaned.startswith("**", at):
            token, length = ANY, 2
        elif cleaned[at] == "*":
            token, length = NAME, 1
        elif cleaned[at] == "?":
            token, length = "[^/]", 1
        elif cleaned[at] == "[" and (end := cleaned.find("]", at + 2)) > 0:
            token, length = "[" + cleaned[at + 1 : end].replace("\\", "\\\\") + "]", end + 1 - at
        else:
            at += cleaned[at] == "\\" and at + 1 < len(cleaned)
            token, length = re.escape(cleaned[at]), 1
        yield token
        at += length


def _matches(tokens: Sequence[tuple[str, re.Pattern[str]]], path: str) -> bool:
    """Follow all ways to match at once, in time linear in the length of both."""

    def reach(at: int) -> None:
        while at not in found:
            found.add(at)
            if at < len(tokens) and tokens[at][0] in (FOLDERS, ANY, NAME):
                at += 1

    found: set[int] = set()
    reach(0)
    for character in path:
        before, found = found - {len(tokens)}, set()
        for at in before:
            token, one = tokens[at]
            if token == FOLDERS:
                found.add(at)  # within the folders: what comes after them begins after a slash
                if character == "/":
                    reach(at + 1)
            elif one.fullmatch(character):
                reach(at if token in (ANY, NAME) else at + 1)
    return len(tokens) in found

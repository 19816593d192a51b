"""Patches as data: which files they change, and which of those changes an evaluation may not take over.

Guarantees: nothing is run; the parts of a patch, joined, are the patch; a part that is kept is kept unchanged, and
changes no other files than those that its header names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from posixpath import normpath

_HEADER = re.compile(rb"^diff --git ", re.MULTILINE)
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_RENAME = re.compile(rb"(?:rename|copy) (from|to) ")
_EXTENDED = re.compile(
    rb"(?:old|new|deleted file|new file) mode \d{6}|(?:dis)?similarity index \d+%|"
    rb"index [0-9a-f]+\.\.[0-9a-f]+(?: \d{6})?|(?:rename|copy) (?:from|to) .+"
)
_HUNK = re.compile(rb"@@ -\d+(?:,(\d{1,9}))? \+\d+(?:,(\d{1,9}))? @@(?: .*)?", re.DOTALL)
BINARY = b"GIT binary patch"
_BINARY = re.compile(rb"(?:literal|delta) \d+|[A-Za-z][0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]+|")
_LETTERS = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13}

CONFIGURATION = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "tox.toml"),
        *("setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py", ".gitattributes"),
        *(".coveragerc", "run_tests.sh"),
    }
)
"""They decide how tests run or are reported. A repair does not need them."""
COMPILED = (".pyc", ".so")
"""Python imports these as it does modules of the same names."""
RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "py", "unittest", "django", "nose", "tox"})
"""Test runners; a new module at the top of a repository would be imported in their place."""


@dataclass(frozen=True, slots=True)
class FileChange:
    paths: frozenset[str]
    """Before and after, which differ if the file was renamed."""
    data: bytes
    """The lines of the patch, with the header."""

    @property
    def adds(self) -> bool:
        return re.search(rb"^(new file mode|rename to|copy to) ", self._head, re.MULTILINE) is not None

    @property
    def deletes(self) -> bool:
        return re.search(rb"^deleted file mode ", self._head, re.MULTILINE) is not None

    @property
    def is_plain(self) -> bool:
        """Whether nothing in it could be read as the header of another file, or be another spelling of a path."""
        if any(path != normpath(path) or path.startswith(("/", "../")) for path in self.paths):
            return False
        head, body = _split_head(self.data)
        renames = [found[1] for line in head if (found := _RENAME.match(line))]
        if renames not in ([], [b"from", b"to"]):
            return False
        if not body:
            return True
        if body[0] == BINARY:
            return all(map(_BINARY.fullmatch, body[1:]))
        named = [line[4:].removesuffix(b"\t") for line in body[:2]]
        if [line[:4] for line in body[:2]] != [b"--- ", b"+++ "] or not self.paths.issuperset(_names_of(named)):
            return False
        return _has_hunks_only(body[2:])

    @property
    def _head(self) -> bytes:
        return re.split(rb"^(?:@@ |GIT binary patch)", self.data, maxsplit=1, flags=re.MULTILINE)[0]


def split_patch(patch: bytes) -> list[FileChange]:
    """Split a patch in git's format; text before the first header belongs to no part."""
    starts = [found.start() for found in _HEADER.finditer(patch)]
    ends = [*starts[1:], len(patch)]
    parts = [patch[start:end] for start, end in zip(starts, ends, strict=False)]
    return [FileChange(frozenset(_paths(part)), part) for part in parts]


def changed_paths(patch: bytes) -> frozenset[str]:
    return frozenset(path for change in split_patch(patch) for path in change.paths)


def separate_forbidden(patch: bytes, tests: Collection[str], gold: bytes) -> tuple[bytes, list[str]]:
    """Leave out changes that could falsify a report of tests, and those that git did not write; return their paths too.

    The agent may have replaced its sandbox's git.

    `tests` are the files and folders that the evaluation puts in place itself; whatever else the reference patch `gold`
    changes may be changed.
    """
    needed = {path for path in changed_paths(gold) if not _is_test(path, tests)}
    kept, left_out = [], []
    for change in split_patch(patch):
        wrong = sorted(path for path in change.paths - needed if _is_forbidden(path, change.adds, tests))
        if wrong or not change.is_plain:
            left_out += wrong or sorted(change.paths)
        else:
            kept.append(change.data)
    return b"".join(kept), left_out


def _is_test(path: str, tests: Collection[str]) -> bool:
    return any(place in tests for place in (path, *map(str, PurePosixPath(path).parents)))


def _is_forbidden(path: str, is_new: bool, tests: Collection[str]) -> bool:
    pure = PurePosixPath(path)
    first, *rest = pure.parts if pure.parts and pure.parts[0] != "src" else (*pure.parts[1:], "")
    return (
        _is_test(path, tests)
        or pure.name in CONFIGURATION
        or (pure.suffix in COMPILED and f"{pure.name.split('.')[0]}.py" in CONFIGURATION)
        or pure.suffix in (".pth", ".egg-link")
        or any(part.endswith((".egg-info", ".dist-info")) or part == ".git" for part in pure.parts)
        or (is_new and first.split(".")[0] in RUNNERS and (bool(rest) or first.endswith((".py", *COMPILED))))
    )


def _split_head(part: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the lines of the header in git's format, and those after it."""
    lines = part.removesuffix(b"\n").split(b"\n")
    end = next((at for at, line in enumerate(lines) if at and not _EXTENDED.fullmatch(line)), len(lines))
    return lines[:end], lines[end:]


def _has_hunks_only(lines: list[bytes]) -> bool:
    """Return whether each line belongs to a hunk, by the counts that the hunks begin with."""
    old = new = 0
    for line in lines:
        sign = line[:1] or b" "  # some programs cut the space of an empty line
        if sign == b"\\":
            continue
        if old or new:
            old -= sign in b" -"
            new -= sign in b" +"
            if sign not in b" -+" or min(old, new) < 0:
                return False
        elif found := _HUNK.fullmatch(line):
            old, new = (1 if count is None else int(count) for count in found.groups())
        else:
            return False
    return not (old or new)


def _names_of(named: list[bytes]) -> Iterator[str]:
    """Yield the paths of `--- a/X` and `+++ b/X`."""
    for name in named:
        if name != b"/dev/null":
            text = _text(name)
            yield text[2:] if text[:2] in ("a/", "b/") else text


def _paths(part: bytes) -> Iterator[str]:
    (header, *extended), _ = _split_head(part)
    named = [line[found.end() :] for line in extended if (found := _RENAME.match(line))]
    for name in named or _both(header.removeprefix(b"diff --git ")):
        yield _text(name)


def _both(header: bytes) -> list[bytes]:
    """Read `a/X b/X`; both paths are X unless the file was renamed."""
    if header.startswith(b'"'):
        return [b'"' + found[2:] + b'"' for found in _QUOTED.findall(header)]
    half = (len(header) - 1) // 2
    names = (header[:half], header[half + 1 :])
    if names[0][2:] != names[1][2:]:  # written by hand, or quoted on one side
        names = tuple(header.split(b" b/", 1)) if b" b/" in header else names  # type: ignore[assignment]
        return [names[0][2:], names[1].removeprefix(b"b/")]
    return [name[2:] for name in names]


def _text(name: bytes) -> str:
    """Read a path, which git writes as a string of C if it has unusual characters."""
    if name.startswith(b'"'):
        name = _ESCAPE.sub(_unescape, name[1:-1])
    return name.decode(errors="surrogateescape")


def _unescape(found: re.Match[bytes]) -> bytes:
    code = found[1]
    return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else bytes([_LETTERS.get(code, code[0])])

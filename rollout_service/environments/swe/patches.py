"""Patches as data: which files they change, and which of those changes an evaluation may not take over.

Guarantees: nothing is run; the parts of a patch, joined, are the patch; a part that is kept is kept unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

_HEADER = re.compile(rb"^diff --git ", re.MULTILINE)
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_LETTERS = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13}

CONFIGURATION = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "tox.toml"),
        *("setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py", ".gitattributes"),
        *(".coveragerc", "run_tests.sh"),
    }
)
"""They decide how tests run or are reported. A repair does not need them."""
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
    """Leave out changes that could falsify a report of tests; return their paths too.

    `tests` are the files that the evaluation puts in place itself; whatever else the reference patch `gold` changes may
    be changed.
    """
    needed = changed_paths(gold) - set(tests)
    kept, left_out = [], []
    for change in split_patch(patch):
        wrong = sorted(path for path in change.paths - needed if _is_forbidden(path, change.adds, tests))
        left_out += wrong
        if not wrong:
            kept.append(change.data)
    return b"".join(kept), left_out


def _is_forbidden(path: str, is_new: bool, tests: Collection[str]) -> bool:
    pure = PurePosixPath(path)
    first, *rest = pure.parts if pure.parts and pure.parts[0] != "src" else (*pure.parts[1:], "")
    return (
        path in tests
        or pure.name in CONFIGURATION
        or pure.suffix in (".pth", ".egg-link")
        or any(part.endswith((".egg-info", ".dist-info")) or part == ".git" for part in pure.parts)
        or (is_new and first.split(".")[0] in RUNNERS and (bool(rest) or first.endswith(".py")))
    )


def _paths(part: bytes) -> Iterator[str]:
    lines = part.split(b"\n")
    named = [line[found.end() :] for line in lines[1:6] if (found := _RENAME.match(line))]
    header = lines[0].removeprefix(b"diff --git ")
    for name in named or _both(header):
        yield _text(name)


_RENAME = re.compile(rb"^(rename|copy) (from|to) ")


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

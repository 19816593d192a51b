"""Mistakes in an environment's folder that would otherwise appear only when a rollout is set up or scored.

Guarantee: nothing is run, and each finding names the file and the remedy.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from rollout_service.environments.declarative.declaration import INSIDE, Declaration
from rollout_service.environments.declarative.files import PackedFile

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SEPARATORS = {";", "&", "&&", "|", "||", "(", ")"}
_NAMED = re.compile(rf"(?<![\w./-]){INSIDE}/([^\s;|&<>'\"()$]+)")
_MOUNTED = re.compile(r">>?\s*(/etc/(?:hosts|passwd|group|resolv\.conf)\b|/dev/shm/[^\s;|&]*)")
_CREATES = re.compile(rf"(?:>|\b(?:mkdir|touch|tee)\b[^;|&]*?)\s*{INSIDE}/")


def findings(declaration: Declaration, files: Sequence[PackedFile]) -> Iterator[str]:
    by_path = {file.path: file for file in files}
    yield from _lost(declaration)
    for where, command in _commands(declaration):
        if _CREATES.search(command):
            continue  # it creates files there itself
        yield from _missing(where, command, by_path)
        yield from _not_runnable(where, command, by_path)


def _lost(declaration: Declaration) -> Iterator[str]:
    """Find writes of a shared command that no other sandbox sees."""
    if declaration.init is not None and declaration.init.shared:
        for path in sorted(set(_MOUNTED.findall(declaration.init.command))):
            yield f"[init] command writes to {path}, which is not shared: let `each` do so, or set shared = false"


def _commands(declaration: Declaration) -> Iterator[tuple[str, str]]:
    if declaration.init is not None:
        yield "[init] command", declaration.init.command
        if declaration.init.each:
            yield "[init] each", declaration.init.each
    yield "[evaluate] command", declaration.evaluate.command


def _missing(where: str, command: str, files: Iterable[str]) -> Iterator[str]:
    for name in _NAMED.findall(command):
        path = name.strip("/")
        if not any(f"{file}/".startswith(f"{path}/") for file in files):
            yield f"{where}: {INSIDE}/{path} does not exist: the folder has no file {path}"


def _not_runnable(where: str, command: str, files: dict[str, PackedFile]) -> Iterator[str]:
    for program in _programs(command):
        file = files.get(program.removeprefix(f"{INSIDE}/"))
        if file is None:
            continue
        if not file.executable:
            yield f"{where}: {program} is not executable: chmod +x {file.path}, or name its interpreter"
        elif file.data.startswith(b"#!") and file.data.split(b"\n", 1)[0].endswith(b"\r"):
            yield f"{where}: {program} has Windows line endings, so its first line names no program; convert them"


def _programs(command: str) -> Iterator[str]:
    """Yield first words of simple commands, as far as they are known without running the shell."""
    words = shlex.shlex(command, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    begins = True
    try:
        for word in words:
            if word in _SEPARATORS:
                begins = True
            elif begins and not _ASSIGNMENT.match(word):
                begins = False
                yield word
    except ValueError:  # an open quote, which the shell would reject too
        return

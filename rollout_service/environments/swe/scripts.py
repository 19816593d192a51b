"""Scripts of bash that run a task's tests, in the form of swebench's own, and the canary in them.

A canary is a test that must fail, in a file with a random name that no patch can know. A report without its failure is
no evidence.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from rollout_service.environments.swe.patches import split_patch

START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"
EXIT_CODE = ">>>>> Test Exit Code"

_PYTEST = re.compile(r"(?:^|[\s/])(?:pytest|py\.test|tox|bin/test)(?=\s|$)")
_DJANGO = re.compile(r"(?:^|[\s/])runtests\.py(?=\s|$)")
_FOLDER_OF_R2E = re.compile(r"(?:^|[\s/])run_tests\.sh(?=\s|$)")
_END_OF_COMMAND = re.compile(r"\s(?:[|;>]|&&|2>)")

ACTIVATE = """\
if [ -f /opt/miniconda3/bin/activate ]; then
    set +u; source /opt/miniconda3/bin/activate; conda activate testbed; set -u
elif [ -f {folder}/.venv/bin/activate ]; then
    set +u; source {folder}/.venv/bin/activate; set -u
fi
cd {folder}
git config --global --add safe.directory {folder}"""


def make_script(
    folder: str,
    command: str,
    files: Sequence[str],
    *,
    base: str = "",
    test_patch: str = "",
    restore: bool = False,
    before: str = "",
) -> str:
    """Put the tests in place, run them, and take them away again.

    `files` are the arguments of `command`. The `test_patch` changes the tests of the commit `base`; with `restore`, the
    tests are those of the repository's last commit that has them. The command `before` runs first of all.
    """
    place = shlex.quote(folder)
    lines = ["#!/bin/bash", "set -uxo pipefail", ACTIVATE.format(folder=place), before]
    changed = [min(change.paths) for change in split_patch(test_patch.encode()) if not change.adds]
    back = f"git checkout {base} {shlex.join(changed)}" if changed else ""
    if test_patch:
        word = f"EOF_{hashlib.sha256(test_patch.encode()).hexdigest()[:16]}"
        lines += [back, f"git apply -v - <<'{word}'", test_patch.removesuffix("\n"), word]
    if restore:
        named = [shlex.quote(file) for file in files]
        lines += [f"git checkout HEAD -- {file} || git checkout HEAD~1 -- {file}" for file in named]
    lines += [f": '{START}'", f"{command} {shlex.join(files)}".rstrip(), f": '{END}'", back]
    return "\n".join(line for line in lines if line) + "\n"


@dataclass(frozen=True, slots=True)
class PlantedScript:
    text: str
    control: str
    """The same script with the canary alone, which tells whether tests can be run here at all."""
    canary: str
    """A unique part of the canary's id; "" if none could be planted."""

    def status(self, statuses: Mapping[str, str]) -> str | None:
        """Return None if the canary was not reported."""
        found = (status for name, status in statuses.items() if self.canary and self.canary in name)
        return next(found, None)


def plant_canary(script: str, tests: Collection[str], folder: str) -> PlantedScript:
    """Add a canary to the tests of a script of swebench's form, and print their exit code.

    The control leaves the files `tests` out; `folder` is the repository.
    """
    lines = script.rstrip("\n").split("\n")
    start = next((number for number, line in enumerate(lines) if START in line), None)
    end = next((number for number, line in enumerate(lines) if END in line), None)
    if start is None or end is None:
        return PlantedScript(script, script, "")
    token = secrets.token_hex(6)
    command = next((n for n in range(end - 1, start, -1) if _runner(lines[n])), None)
    if command is None:
        text = "\n".join([*lines[:end], *_with_exit_code(lines[end]), *lines[end + 1 :]]) + "\n"
        return PlantedScript(text, text, "")
    planting, argument = _canary(lines[command], tests, folder, token)

    def with_command(line: str) -> str:
        body = [*lines[:start], planting, *lines[start:command], line, *lines[command + 1 : end]]
        return "\n".join([*body, *_with_exit_code(lines[end]), *lines[end + 1 :]]) + "\n"

    alone = _without(lines[command], tests)
    return PlantedScript(with_command(_append(lines[command], argument)), with_command(_append(alone, argument)), token)


def _runner(line: str) -> bool:
    return any(kind.search(line) for kind in (_PYTEST, _DJANGO, _FOLDER_OF_R2E))


def _with_exit_code(marker: str) -> list[str]:
    return ["SWEBENCH_TEST_EXIT_CODE=$?", marker, f'echo "{EXIT_CODE}: $SWEBENCH_TEST_EXIT_CODE"']


def _canary(line: str, tests: Collection[str], folder: str, token: str) -> tuple[str, str]:
    """Return a line that writes a canary, and the argument that runs it."""
    one, other = secrets.randbelow(10**6), secrets.randbelow(10**6) + 10**6
    if _DJANGO.search(line):
        module = f"{folder}/tests/case_{token}"
        text = (
            "from django.test import SimpleTestCase\n\n\nclass Tests(SimpleTestCase):\n"
            f"    def test_{token}(self):\n        self.assertEqual({one}, {other})\n"
        )
        files = {f"{module}/__init__.py": "", f"{module}/tests.py": text}
        return _writing(files), f"case_{token}"
    text = f"def test_{token}():\n    assert {one} == {other}\n"
    if _FOLDER_OF_R2E.search(line):
        return _writing({f"{folder}/r2e_tests/test_{token}.py": text}), ""
    near = next((path for path in sorted(tests) if PurePosixPath(path).name.startswith("test")), "")
    path = str(PurePosixPath(near).parent / f"test_{token}.py")
    return _writing({f"{folder}/{path}": text}), shlex.quote(path)


def _writing(files: dict[str, str]) -> str:
    commands = []
    for path, text in files.items():
        commands.append(f"mkdir -p {shlex.quote(str(PurePosixPath(path).parent))}")
        commands.append(f"printf %s {shlex.quote(text)} >{shlex.quote(path)}")
    return " && ".join(commands)


def _append(line: str, argument: str) -> str:
    """Put the argument before redirections."""
    runner = next(found for kind in (_PYTEST, _DJANGO, _FOLDER_OF_R2E) if (found := kind.search(line)))
    cut = _END_OF_COMMAND.search(line, runner.end())
    at = cut.start() if cut else len(line)
    return f"{line[:at]} {argument}{line[at:]}" if argument else line


def _without(line: str, tests: Collection[str]) -> str:
    """Leave out the tests that a command names."""
    if _FOLDER_OF_R2E.search(line):
        return line  # it names none, and runs all of a folder
    words = line.split(" ")
    if _DJANGO.search(line):
        while len(words) > 1 and re.fullmatch(r"[A-Za-z_][\w.]*", words[-1]):
            words.pop()
        return " ".join(words)
    return " ".join(word for word in words if word.split("::")[0].strip("'\"") not in tests)

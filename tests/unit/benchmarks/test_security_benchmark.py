"""An attack that does not take place is not counted as one that was withstood."""

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from sandboxes import BashResult, PythonErrorInfo, PythonResult, Sandbox, SandboxSpec
from tests.support.hostile import CHECKS
from tests.support.named_sandboxes import NamedProvider, NamedSandbox


class Broken(NamedSandbox):
    """A sandbox in which the checks' own commands work, and every attack breaks off at once."""

    async def bash(self) -> Any:
        async def run(command: str, timeout: float | None = None) -> BashResult:
            fails = not command.startswith("echo")
            return BashResult("" if fails else "up\n", int(fails), timed_out=False, truncated=False, seconds=0.0)

        return SimpleNamespace(run=run)

    async def python(self) -> Any:
        async def execute(code: str, timeout: float | None = None) -> PythonResult:
            short = {"6 * 7": "42", "1 + 1": "2"}.get(code)
            error = None if short else PythonErrorInfo("SyntaxError", "invalid syntax", "")
            return PythonResult("", short, error, timed_out=False, truncated=False, seconds=0.0)

        async def restart() -> None:
            raise AssertionError("it has not died")

        return SimpleNamespace(execute=execute, restart=restart)

    async def write_file(self, path: str, data: str) -> None:
        """Take the script of an attack."""


class BrokenProvider(NamedProvider):
    async def start(self, spec: SandboxSpec) -> Sandbox:
        sandbox = self.alive[f"s{len(self.alive)}"] = Broken(self, len(self.alive), spec)
        return sandbox


@pytest.mark.parametrize("name", ["every_descriptor", "forged_messages", "planted_files"])
async def test_a_check_whose_script_breaks_at_once_fails(name):
    with pytest.raises(AssertionError):
        await CHECKS[name](BrokenProvider())


@pytest.mark.slow  # it imports what the benchmark measures
def test_a_program_that_ends_without_a_word_has_not_held(monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    from benchmarks.security import attack_as

    dead = subprocess.CompletedProcess([], -9, "", "")
    user = SimpleNamespace(run=lambda *_, **__: dead, processes=list)
    assert attack_as(user, "fork_bomb").failure == "exit code -9: "

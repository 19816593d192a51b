"""The conformance command checks third-party providers, and names the promises that one breaks."""

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from sandboxes import LocalConfig, SandboxProvider
from sandboxes.conformance import CHECKS
from sandboxes.conformance.__main__ import main
from sandboxes.providers.local import LocalProvider

app = Typer()
app.command()(main)
HERE = "tests.unit.sandboxes.providers.test_conformance_command"


class Claims(LocalProvider):
    """Lists a failure that does not exist, and omits one that does."""

    known_failures = {"exec_at_once": "it was so once"}  # type: ignore[assignment]


def honest(state: Path) -> SandboxProvider:
    return LocalProvider(LocalConfig(provider="local"), state)


def dishonest(state: Path) -> SandboxProvider:
    return Claims(LocalConfig(provider="local"), state)


def no_provider(state: Path) -> str:
    return "none"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_a_custom_provider_is_checked(tmp_path):
    report = tmp_path / "report.json"
    checks = ("--check", "exec_at_once", "--check", "no_rights", "--check", "hidden_network")
    code, output = run(f"{HERE}:honest", *checks, "--json", str(report))
    assert code == 0, output
    found = json.loads(report.read_text())
    assert found["conforms"] is True
    verdicts = {outcome["check"]: outcome["verdict"] for outcome in found["outcomes"]}
    assert verdicts == {
        "exec_at_once": "holds",
        "hidden_network": "known failure",
        "no_rights": "known failure",
    }


def test_an_undeclared_failure_fails_and_a_fixed_one_is_shown():
    code, output = run(f"{HERE}:dishonest", "--check", "exec_at_once", "--check", "hidden_network")
    assert code == 1
    assert "holds now exec_at_once" in output
    assert "fails hidden_network" in output


@pytest.mark.parametrize(
    "arguments",
    [("local", "--check", "nope"), (f"{HERE}:nope",), ("no_module_of_this:x",), (f"{HERE}:no_provider",)],
)
def test_an_unusable_provider_or_check_is_not_a_failed_check(arguments):
    code, _ = run(*arguments)
    assert code == 2


def test_the_list_names_every_check():
    code, output = run("local", "--list")
    assert code == 0
    assert all(check.__name__ in output for check in CHECKS)
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)
    assert all(check.__doc__ for check in CHECKS)

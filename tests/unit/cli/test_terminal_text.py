"""In every command, text from others reaches the operator's terminal only as text."""

import ast
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text
from typer.testing import CliRunner

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import RolloutState
from rollout_service.base.terminal_text import escape_controls, escape_controls_in_json
from rollout_service.cli import app, common
from rollout_service.cli.console import SafeConsole
from rollout_service.cli.show.trajectory import render_rollout
from rollout_service.environments.contract import EnvironmentSpec
from tests.support import samples
from tests.support.logging_of_service import logged
from tests.support.web_server import Answer, Asked, web_server

pytestmark = pytest.mark.slow

CLI = Path(__file__).parents[3] / "rollout_service" / "cli"
EVIL = "a\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\u202etxt\u2066\U000e0041[red]:bomb:\r\x00z"
OBEYED = ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e", "\u2066", "\U000e0041", "\x00")


def assert_safe(shown: str, *, markup: bool = True) -> None:
    assert not [one for one in OBEYED if one in shown]
    assert not markup or "[red]:bomb:" in shown


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_becomes_printable_and_stays_so(text):
    shown = escape_controls(text)
    shown.encode()
    assert escape_controls(shown) == shown
    assert all(one in "\n\t" or not 0 <= ord(one) < 32 for one in shown)
    document = json.dumps([text], ensure_ascii=False)
    assert json.loads(escape_controls_in_json(document)) == json.loads(document)


def test_the_printed_text_shows_the_original_characters():
    assert escape_controls("a\x1b[2J\n\tb\u202e") == "a\\x1b[2J\n\tb\\u202e"
    assert escape_controls("größer 数学 👩‍🔬") == "größer 数学 👩‍🔬"


def test_only_one_module_makes_consoles_and_one_writes_lines():
    # The templates of environments are programs for sandboxes.
    for path in (path for path in CLI.rglob("*.py") if "templates" not in path.parts):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}
        written = {ast.unparse(call) for call in calls}
        assert "Console" not in names, f"{path.name}: print to common.out() or common.err()"
        assert "Table" not in names, f"{path.name}: make tables with console.table"
        assert path.name == "common.py" or "typer.echo" not in written, f"{path.name}: use common.print_line"
        assert not {"print", "sys.stdout.write", "sys.stderr.write"} & written, path.name


def hostile_answer(asked: Asked) -> Answer:
    """Answer with texts each of which tries to control the terminal."""
    engine = {"backend_id": EVIL, "url": EVIL, "pool": "p", "state": "failed", "model_path": EVIL}
    engine |= {"tokenizer_path": EVIL, "weight_version": 1, "context_length": 1, "in_flight": 0}
    spec = EnvironmentSpec(name="x", image=EVIL, tools=[EVIL], description=EVIL).model_dump(mode="json")
    documents: dict[str, object] = {
        "GET /v1/backends": [engine | {"served": 0, "failures": 1, "last_error": EVIL}],
        "GET /v1/environments": [spec | {"name": EVIL}],
    }
    found = documents.get(f"{asked.method} {asked.path}")
    refusal = {"title": EVIL, "status": 422, "detail": EVIL, "code": "x", "errors": []}
    return 422 if found is None else 200, {}, json.dumps(found or refusal).encode()


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    with web_server(hostile_answer) as address:
        yield f"http://{address}"


COMMANDS = [
    ["backends", "list"],
    ["backends", "list", "--json"],
    ["backends", "drain", "x"],
    ["backends", "remove", "x"],
    ["backends", "add", "http://x:1"],
    ["env", "list"],
    ["env", "list", "--json"],
    ["env", "run", "calc", "--instance", "{}"],
    ["runs", "list"],
    ["runs", "show", "x"],
    ["runs", "lease", "x", "-o", "{folder}/b.json"],
    ["runs", "ack", "x", "x.b0"],
    ["runs", "export", "x", "-o", "{folder}/e.json"],
    ["runs", "rescore", "x"],
    ["runs", "create", "{run}"],
    ["submit", "{tasks}", "-o", "{folder}/out.jsonl"],
    ["watch"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("terminal", [False, True])
def test_no_command_lets_a_server_write_to_the_terminal(hostile, command, terminal, tmp_path, monkeypatch):
    run, tasks = tmp_path / "run.json", tmp_path / "tasks.jsonl"
    run.write_text('{"source": {"kind": "inline", "open": true}, "batch_size": 1}')
    tasks.write_text('{"task": {"environment": "calc"}}')
    paths = {"{folder}": tmp_path, "{run}": run, "{tasks}": tasks}
    arguments = [re.sub(r"\{\w+\}", lambda found: str(paths[found[0]]), part) for part in command]
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, [*arguments, "--url", hostile])
    shown = result.stdout + result.stderr
    assert_safe(shown)
    assert terminal or "\x1b" not in shown


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}], ids=["plain", "colored"])
def test_a_table_in_a_pipe_has_a_line_for_each_row(variables):
    command = [sys.executable, "-m", "rollout_service.cli", "env", "list"]
    environ = {**os.environ, "COLUMNS": "40", **variables}
    shown = subprocess.run([*command, "--json"], capture_output=True, check=True, env=environ, text=True)
    names = [spec["name"] for spec in json.loads(shown.stdout)]
    shown = subprocess.run(command, capture_output=True, check=True, env=environ, text=True)
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:]] == names


def test_a_mistake_in_a_file_is_shown_as_text(tmp_path):
    for arguments in (["runs", "create"], ["env", "check"]):
        path = tmp_path / "environment.toml"
        path.write_text(json.dumps({"source": {"kind": "inline", EVIL: 1}}))
        result = CliRunner().invoke(
            app, [*arguments, str(path), *(["--url", "http://x"] if "runs" in arguments else [])]
        )
        assert result.exit_code == 1
        assert_safe(result.stderr, markup="runs" in arguments)


class Words:
    """A tokenizer that decodes every token to hostile text."""

    def decode(self, token_ids: list[int]) -> str:
        return EVIL * len(token_ids)


def test_a_trajectory_and_its_error_are_shown_as_text(capsys):
    segment = samples.segment([0, 0], [0, 1], logprobs=[0.0, -0.5], versions=[-1, 1])
    error = ErrorInfo(code="x", boundary=Boundary.SANDBOX, message=EVIL)
    rollout = samples.rollout(state=RolloutState.FAILED, error=error, trajectory=samples.trajectory(segment))
    common.out().print(render_rollout(rollout, Words()))
    common.print_json(rollout.model_dump(mode="json"))
    shown = capsys.readouterr().out
    assert_safe(shown)
    assert shown.count("\\x1b") >= 4


def test_the_log_of_a_server_is_shown_as_text():
    with logged(level="info") as shown:
        try:
            int(EVIL)
            Path(f"/nowhere/{EVIL}".replace("\x00", "")).read_text()
        except (OSError, ValueError):
            logging.getLogger("plug-in").exception("it said %s", EVIL)
    assert_safe(shown.getvalue())
    assert shown.getvalue().count("\\x1b]52") >= 2


def test_a_pipe_gets_whole_lines(capsys):
    path = "/a/long/path" * 40
    common.explain(common.CommandError(f"{path} is broken.", hint=f"run `mend {path}` now"))
    console = common.out()
    console.print(Text(f"{path} {path}"))
    assert isinstance(console, SafeConsole)
    captured = capsys.readouterr()
    assert captured.err == f"error: {path} is broken.\nhint: run `mend {path}` now\n"
    assert captured.out == f"{path} {path}\n"

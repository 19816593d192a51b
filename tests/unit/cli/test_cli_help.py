"""The command line explains itself, quickly, and its errors say what to do next."""

import errno
import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from rollout_service.cli import app, common
from rollout_service.cli.common import CommandError

pytestmark = pytest.mark.slow

GROUPS = {
    "trainer": "check",
    "harness": "list check",
    "nodes": "list drain resume remove show set",
    "backends": "list add remove drain",
    "runs": "create list show pause resume end lease ack nack export rescore groups history",
    "sessions": "list show judge delete",
    "config": "show docs",
    "store": "check new-folder",
    "image": "list build pull import inspect remove prune",
    "slurm": "submit scale status logs tunnel stop run node engine",
    "env": "list new add build prepare check attack audit install run serve shell",
}
ALONE = ["serve", "demo", "submit", "show", "watch", "trace", "doctor", "backup", "restore"]
COMMANDS = {(name,) for name in ALONE} | {(group, name) for group, names in GROUPS.items() for name in names.split()}
COMMANDS_AND_GROUPS = {*ALONE, *GROUPS}
WITHOUT_JSON = {
    "serves": "serve, env serve, slurm scale, slurm run, slurm node, slurm engine",
    "only acts, and says so on stderr": "backends remove, nodes remove, runs ack, runs nack, image remove, env new, "
    "env add, env install, slurm stop",
    "hands the terminal over": "env shell",
    "writes a file, or JSON in any case": "runs lease, runs export, runs rescore, trace",
    "prints text that is its own format": "config docs, slurm logs, slurm tunnel",
}
"""The commands whose output is not data, by why it is not."""
HEAVY = {"httpx", "pydantic", "fastapi", "anyio", "rich.console", "transformers", "numpy", "jinja2"}


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_an_example(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert f"Example: rollout-service {' '.join(command)}" in result.stdout


def test_there_is_no_command_that_this_file_does_not_know():
    root = typer.main.get_command(app)
    found = set()
    for name, command in root.commands.items():
        nested = getattr(command, "commands", None)
        found |= {(name, inner) for inner in nested} if nested else {(name,)}
    assert found == COMMANDS


def test_every_command_whose_output_is_data_prints_it_as_json():
    root = typer.main.get_command(app)
    reasonless = set()
    for name in COMMANDS:
        command = root.commands[name[0]]
        command = command if len(name) == 1 else command.commands[name[1]]
        if not any("--json" in parameter.opts for parameter in command.params):
            reasonless.add(name)
    assert reasonless == {tuple(one.split()) for names in WITHOUT_JSON.values() for one in names.split(", ")}


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom rollout_service.cli import app\n"
        "app(['--help'], standalone_mode=False)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_a_command_is_run_without_the_others():
    code = (
        "import sys\nfrom rollout_service.cli import app\n"
        "app(['nodes', 'list', '--help'], standalone_mode=False)\n"
        "print(*(name for name in sys.modules if name.startswith('rollout_service.cli.')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[2] for name in result.stdout.splitlines()[-1].split()}
    assert loaded & (COMMANDS_AND_GROUPS - {"nodes"}) == set()


@pytest.mark.parametrize(
    "command", [("backends", "list"), ("backends", "add", "http://x:1"), ("watch",), ("env", "list")]
)
def test_the_error_for_an_unreachable_server_says_what_to_do(command, free_tcp_port):
    result = invoke(*command, "--url", f"http://127.0.0.1:{free_tcp_port}")
    assert result.exit_code == 1
    assert f"no answer from http://127.0.0.1:{free_tcp_port}" in result.stderr
    assert "rollout-service serve" in result.stderr


def test_a_bad_url_of_a_backend_is_named():
    result = invoke("backends", "add", "not a url")
    assert result.exit_code == 1
    assert "error: url: " in result.stderr


def test_a_known_error_ends_with_its_hint_and_without_a_traceback(capsys):
    def fail() -> None:
        raise ExceptionGroup("from a task group", [CommandError("it is broken", hint="mend it.")])

    with pytest.raises(typer.Exit) as caught:
        common.run_blocking(fail)
    assert caught.value.exit_code == 1
    assert capsys.readouterr().err == "error: it is broken\nhint: mend it.\n"


def test_a_command_whose_output_nobody_reads_any_more_ends_quietly():
    def watch() -> None:
        raise ExceptionGroup("from a task group", [BrokenPipeError(errno.EPIPE, "Broken pipe")])

    with pytest.raises(BrokenPipeError):  # which ends `main` without a word
        common.run_blocking(watch)


def test_json_has_no_number_that_json_cannot_hold(capsys):
    common.print_json({"a": float("nan"), "b": [float("inf"), 0.5]})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"a": None, "b": [None, 0.5]}


def test_a_defect_keeps_its_traceback():
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        common.run_blocking(fail)


def test_the_exit_code_of_a_command_is_its_own():
    async def partly() -> int:
        return 3

    with pytest.raises(typer.Exit) as caught:
        common.command(partly)()
    assert caught.value.exit_code == 3

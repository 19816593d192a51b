"""Completion offers what the server knows, in time, and is silent about everything else."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from rollout_service.cli import app
from tests.support.web_server import Answer, Asked, web_server

pytestmark = pytest.mark.slow

ANSWERS = {
    "/v1/runs": {"runs": [{"run_id": "dapo-7b"}, {"run_id": "dapo-32b"}, {"run_id": "other"}]},
    "/v1/summaries": {"rows": [{"rollout_id": "r-2"}, {"rollout_id": "r-1"}, {"rollout_id": "$(reboot)"}]},
    "/v1/backends": [{"backend_id": "policy@gpu-1:30000"}],
    "/v1/environments": [{"name": "calc"}, {"name": "code"}],
    "/v1/nodes": [{"node": "node-1"}],
}


class Server:
    """Answers with what it knows, and keeps the keys that it was shown."""

    url: str

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def answer(self, asked: Asked) -> Answer:
        self.keys.append(asked.headers.get("Authorization"))
        self.goes_on.wait(20)
        path = asked.path.partition("?")[0]
        return 200 if path in ANSWERS else 404, {}, json.dumps(ANSWERS.get(path)).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    with web_server(found.answer) as address:
        found.url = f"http://{address}"
        yield found


def variables(line: str) -> dict[str, str]:
    """Return what bash sets to ask for the last word of a line."""
    words = {"_ROLLOUT_SERVICE_COMPLETE": "complete_bash", "COMP_WORDS": line}
    return words | {"COMP_CWORD": str(len(line.split(" ")) - 1)}


def complete(line: str, **environ: str) -> list[str]:
    """Return what bash is offered for the last word of a line."""
    done = CliRunner().invoke(app, [], prog_name="rollout-service", env=environ | variables(line))
    assert not done.stderr
    return done.stdout.split()


def test_the_program_completes():
    done = subprocess.run(
        [sys.executable, "-m", "rollout_service.cli"],
        env=os.environ | variables("rollout-service sub"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["submit"], "")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("runs show dapo", ["dapo-7b", "dapo-32b"]),
        ("runs pause ", ["dapo-7b", "dapo-32b", "other"]),
        ("show r", ["r-2", "r-1"]),
        ("show $", []),
        ("backends drain ", ["policy@gpu-1:30000"]),
        ("nodes drain ", ["node-1"]),
        ("env check c", ["calc", "code"]),
    ],
)
def test_ids_are_completed(server, line, offered):
    assert complete(f"rollout-service {line}", ROLLOUT_URL=server.url, ROLLOUT_KEY="secret") == offered


def test_the_server_and_the_key_of_the_line_are_asked(server):
    line = f"rollout-service runs show --url {server.url} --key mine d"
    assert complete(line, ROLLOUT_URL="http://127.0.0.1:9") == ["dapo-7b", "dapo-32b"]
    assert server.keys[-1] == "Bearer mine"


@pytest.mark.parametrize("elsewhere", ["http://127.0.0.1:9", "file:///etc/passwd", "nonsense"])
def test_a_server_that_does_not_answer_is_no_error(elsewhere):
    assert complete("rollout-service runs show ", ROLLOUT_URL=elsewhere) == []


def test_a_slow_server_is_not_waited_for(server):
    server.goes_on.clear()
    started = time.monotonic()
    assert complete("rollout-service runs show ", ROLLOUT_URL=server.url) == []
    assert time.monotonic() - started < 15
    server.goes_on.set()


def test_images_of_this_machine_are_completed(tmp_path):
    for name in ("base.sif", "python.sif", "notes.txt"):
        (tmp_path / name).touch()
    assert sorted(complete("rollout-service image inspect ", ROLLOUT_IMAGES_DIR=str(tmp_path))) == [
        "base",
        "python",
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell):
    done = subprocess.run(
        [sys.executable, "-m", "rollout_service.cli", "--show-completion", shell],
        env=os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_ROLLOUT_SERVICE_COMPLETE" in done.stdout
    assert f"complete_{shell}" in done.stdout

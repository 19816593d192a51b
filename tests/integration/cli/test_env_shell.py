"""`env shell` gives a real terminal in a sandbox, and removes the sandbox however the shell ends."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from rollout_service.cli.env.new import make_environment
from sandboxes.host.processes import find_processes
from tests.support.terminal.terminal import Terminal, terminal

SECONDS = 30.0
FOREGROUND = "bash -c 'echo be\"\"gun; exec sleep 600'\r"
Open = Callable[..., AbstractContextManager[Terminal]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment("words", tmp_path_factory.mktemp("environments"), "files")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shell-") as folder:  # sockets need a short path
        Path(folder).chmod(0o711)
        yield Path(folder)


def command(environment: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "rollout_service.cli", "env", "shell", str(environment), *flags]


@pytest.fixture
def opened(environment: Path, run_dir: Path) -> Open:
    def shell(*flags: str, provider: str = "local") -> AbstractContextManager[Terminal]:
        settings = {"ROLLOUT_SANDBOX__PROVIDER": provider, "ROLLOUT_SANDBOX__RUN_DIR": str(run_dir)}
        return terminal(command(environment, *flags), size=(100, 30), **settings)

    return shell


def wait_for_prompt(shown: Terminal) -> None:
    shown.until(lambda: "sandbox:" in shown.drawn)


def services(run_dir: Path) -> set[str]:
    return {folder.name for folder in run_dir.iterdir()}


def is_left(run_dir: Path, services: set[str]) -> bool:
    return any(run_dir.glob("*/[0-9]*")) or bool(find_processes(lambda one: one.partition("-")[0] in services))


@pytest.mark.parametrize(
    ("provider", "init"),
    [
        ("local", ""),
        # base may have to be built
        pytest.param("apptainer", ".control", marks=[pytest.mark.apptainer, pytest.mark.timeout(600)]),
    ],
)
def test_it_is_a_terminal_with_a_size_and_its_keys_reach_the_programs(opened, run_dir, provider, init):
    with opened(provider=provider) as shown:
        wait_for_prompt(shown)
        shown.type("tty; pwd; echo first=$(cat /proc/1/comm); stty size; cat text.txt\r")
        shown.until(lambda: "/dev/pts/" in shown.drawn and "30 100" in shown.drawn and "quick" in shown.drawn)
        assert f"first={init}" in shown.drawn
        assert provider == "local" or "/workspace" in shown.drawn
        shown.resize(77, 33)
        shown.type("until [[ $(stty size) == '33 77' ]]; do :; done; echo re''sized\r")
        shown.until(lambda: "resized" in shown.drawn)
        shown.type(FOREGROUND)
        shown.until(lambda: "begun" in shown.drawn)
        shown.type("\x03")
        shown.type("echo co''de=$?\r")
        shown.until(lambda: "code=130" in shown.drawn)
        assert (found := services(run_dir)), "the sandbox is where the test looks"
        assert is_left(run_dir, found)
        shown.type("(setsid sleep 600 &); exit 7\r")
        assert shown.ended() == 7
        assert shown.settings == shown.before
        assert not is_left(run_dir, found)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda shown: shown.type("kill -9 $$\r"), 137),
        (lambda shown: shown.type("kill -9 $PPID\r"), 137),
        (Terminal.hang_up, 129),
        (lambda shown: shown.process.send_signal(signal.SIGTERM), 143),
    ],
    ids=["shell killed", "its parent killed", "terminal closed", "signal"],
)
def test_a_shell_that_ends_in_any_way_leaves_no_sandbox(opened, run_dir, end, code):
    with opened() as shown:
        wait_for_prompt(shown)
        found = services(run_dir)
        end(shown)
        assert shown.process.wait(SECONDS) == code
        assert not is_left(run_dir, found)


def test_a_command_that_is_killed_leaves_no_sandbox(opened, run_dir):
    with opened() as shown:
        wait_for_prompt(shown)
        found = services(run_dir)
        shown.process.kill()
        shown.process.wait(SECONDS)
        deadline = time.monotonic() + SECONDS
        while is_left(run_dir, found):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_the_grader_finds_what_the_solution_left(opened):
    with opened("--stage", "evaluate", "--solve") as shown:
        wait_for_prompt(shown)
        shown.type("echo answer=$(cat answer.txt)\r")
        shown.until(lambda: re.search(r"answer=9\s.*sandbox:", shown.drawn, re.DOTALL) is not None)
        shown.type("ls $ROLLOUT_ENVIRONMENT; ls $ROLLOUT_RESULT || echo not''yet\r")
        # Before its prompt, bash reads lines: the key would be the end of a file to nobody.
        shown.until(lambda: re.search(r"environment.toml.*notyet\s.*sandbox:", shown.drawn, re.DOTALL) is not None)
        shown.type("\x04")
        assert shown.ended() == 0


def test_without_a_terminal_it_says_so(environment):
    done = subprocess.run(command(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "must be a terminal" in done.stderr

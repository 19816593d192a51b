"""Bridges run libraries in processes of their own, and execute no code that an answer brings."""

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.bridges.games.library import WORKER
from rollout_service.environments.bridges.games.library import write_tasks as write_games
from rollout_service.environments.bridges.gem.environment import GEM
from rollout_service.environments.bridges.gem.environment import environment as gem_games
from rollout_service.environments.bridges.gymnasium.environment import GYMNASIUM
from rollout_service.environments.bridges.gymnasium.environment import environment as gymnasium_games
from rollout_service.environments.bridges.gymnasium.worker import act
from rollout_service.environments.bridges.nemo_gym.environment import NemoGym
from rollout_service.environments.bridges.process import LibraryProcess, library_in_sandbox, library_process
from rollout_service.environments.bridges.reasoning_gym.environment import (
    ReasoningGym,
    final_answer,
    read_score,
)
from rollout_service.environments.bridges.reasoning_gym.generate import REASONING_GYM, write_tasks
from rollout_service.environments.bridges.reasoning_gym.worker import import_alone, is_harmless
from rollout_service.environments.bridges.textarena.environment import TEXTARENA
from rollout_service.environments.bridges.textarena.environment import environment as textarena_games
from rollout_service.environments.bridges.textarena.worker import put_in_order
from rollout_service.environments.bridges.verifiers.catalog import compile_modules
from sandboxes import ExecResult, LocalConfig, SandboxSpec, make_provider
from tests.support.waiting import until

TASK: dict[str, JsonValue] = {
    "question": "Calculate 10 using 4 and 6.",
    "task": "countdown",
    "module": "reasoning_gym.games.countdown",
    "seed": 7,
    "size": 1,
    "index": 0,
    "config": {},
}
ECHO = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    match request["do"]:
        case "echo": print(json.dumps({"pid": os.getpid(), **request}), flush=True)
        case "fail": print(json.dumps({"error": "ValueError: no"}), flush=True)
        case "noise": print("hello", flush=True)
        case "number": print(5, flush=True)
        case "deep": print("[" * 100_000, flush=True)
        case "long": print(json.dumps({"text": "x" * 5_000_000}), flush=True)
        case "end": sys.exit(3)
        case "slow":
            open(request["begun"], "w").close()
            while not os.path.exists(request["go_on"]): time.sleep(0.01)
            print(json.dumps({"n": 1}), flush=True)
        case "hang": time.sleep(600)
"""


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@asynccontextmanager
async def on_the_host(program: str, tmp_path: Path) -> AsyncIterator[LibraryProcess]:
    async with library_process([sys.executable, "-c", program], "echo") as process:
        yield process


@asynccontextmanager
async def in_a_sandbox(program: str, tmp_path: Path) -> AsyncIterator[LibraryProcess]:
    provider = make_provider(LocalConfig(provider="local"), tmp_path)
    try:
        async with (
            await provider.start(SandboxSpec(image="base")) as sandbox,
            library_in_sandbox(sandbox, [sys.executable, "-c", program], "echo") as process,
        ):
            yield process
    finally:
        await provider.close()


Place = Callable[[str, Path], AbstractAsyncContextManager[LibraryProcess]]
PLACES: list[Place] = [on_the_host, in_a_sandbox]


async def wait_gone(pid: int) -> None:
    """Wait until a process has ended; whoever has a child may collect it a moment after it was killed."""
    await until(lambda: not is_running(pid), 30)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("place", PLACES)
async def test_a_library_replies_line_by_line_and_ends_with_its_block(place, tmp_path):
    async with place(ECHO, tmp_path) as process:
        replies = [await process.ask({"do": "echo", "n": n}, 30) for n in range(3)]
        assert [reply["n"] for reply in replies] == [0, 1, 2]
        with pytest.raises(EnvironmentFailedError, match="echo failed: ValueError: no"):
            await process.ask({"do": "fail"}, 30)
        assert (await process.ask({"do": "echo"}, 30))["pid"] == replies[0]["pid"]
    await wait_gone(replies[0]["pid"])


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("does", "seconds", "why"),
    [
        ("end", 30, "ended"),
        ("noise", 30, "something else"),
        ("number", 30, "something else"),
        ("deep", 30, "something else"),
        ("hang", 0.1, "within 0.1 s"),
    ],
)
async def test_a_library_that_ends_hangs_or_babbles_is_an_error(place, does, seconds, why, tmp_path):
    async with place(ECHO, tmp_path) as process:
        await process.ask({"do": "echo"}, 30)
        with pytest.raises(EnvironmentFailedError, match=why):
            await process.ask({"do": does}, seconds)


async def test_a_reply_from_a_sandbox_is_no_longer_than_can_be_read_at_once(tmp_path):
    async with in_a_sandbox(ECHO, tmp_path) as process:
        with pytest.raises(EnvironmentFailedError, match="something else"):
            await process.ask({"do": "long"}, 30)


@pytest.mark.parametrize("place", PLACES)
async def test_the_reply_to_a_cancelled_request_is_not_that_to_the_next(place, tmp_path):
    async with place(ECHO, tmp_path) as process:
        await process.ask({"do": "echo"}, 30)
        begun, go_on = tmp_path / "begun", tmp_path / "go on"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.ask, {"do": "slow", "begun": str(begun), "go_on": str(go_on)}, 30)
            await until(begun.exists)
            tasks.cancel_scope.cancel()
        go_on.touch()
        assert (await process.ask({"do": "echo", "n": 2}, 30))["n"] == 2


@pytest.mark.parametrize("waits", [False, True])
async def test_a_library_that_cannot_start_is_an_error(waits):
    async with library_process(["/bin/false"], "false") as process:
        if waits:
            with pytest.raises(anyio.IncompleteRead):
                await process._replies.receive_exactly(1)
        with pytest.raises(EnvironmentFailedError, match="the process of false ended"):
            await process.ask({"do": "x" * 10_000_000}, 30)


async def test_a_cancelled_request_leaves_no_process():
    pid = 0
    with anyio.CancelScope() as scope:
        async with library_process([sys.executable, "-c", ECHO], "echo") as process:
            pid = (await process.ask({"do": "echo"}, 30))["pid"]
            scope.cancel()
            await process.ask({"do": "hang"}, 600)
    assert scope.cancelled_caught
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("environment", "instance"),
    [
        (ReasoningGym(), TASK),
        (textarena_games, {"game": "GuessTheNumber-v0", "seed": 1}),
        (NemoGym(), {"server": "mcqa", "row": {"responses_create_params": {"input": "Which?"}}}),
        (gymnasium_games, {"game": "Taxi-v4", "seed": 1}),
        (gem_games, {"game": "game:Sudoku-v0-easy", "seed": 1}),
    ],
    ids=["reasoning-gym", "textarena", "nemo-gym", "gymnasium", "gem"],
)
def test_without_the_library_the_error_names_the_command_that_installs_it(environment, instance, nothing_installed):
    for use in (environment.dataset, lambda: environment.check(instance)):
        with pytest.raises(ConfigurationError) as caught:
            use()
        assert f"rollout-service env install {environment.spec.name}" in caught.value.hint


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (write_tasks, "tasks of reasoning-gym cannot be made"),
        (partial(write_games, "gem", GEM.part, (1,)), "games of gem cannot be listed"),
        (compile_modules, "verifiers cannot be imported"),
    ],
    ids=["tasks", "games", "modules"],
)
def test_a_library_that_does_not_work_here_is_not_installed(tmp_path, write, why):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to("/bin/false")
    with pytest.raises(ConfigurationError, match=why):
        write(tmp_path)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("[left]", 0),
        ("First [right], no: [ Left ]", 0),
        ("[1]", 1),
        ("[3]", None),
        ("[left] and then [fly]", None),
        ("left", None),
        ("", None),
    ],
)
def test_the_last_action_in_brackets_counts(text, action):
    assert act(text, ("left", "down", "right")) == action


@pytest.mark.parametrize("games", [GEM, GYMNASIUM, TEXTARENA], ids=lambda games: str(games.library.name))
def test_the_worker_of_games_needs_nothing_but_the_standard_library(games):
    reset = {"op": "reset", "game": "Taxi-v4", "seed": 1, "players": 1}
    lines = "".join(f"{json.dumps(request)}\n" for request in (reset, {"op": "step", "action": "x"}))
    command = [sys.executable, "-I", "-S", "-c", WORKER.read_text(), games.part.read_text(), "/nowhere"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    first, second = (json.loads(line)["error"] for line in done.stdout.splitlines())
    assert "No module named" in first
    assert "no game has begun" in second


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"seed": "x"}, "instance.seed"),
        ({"module": "os.path"}, "instance.module"),
        ({"module": "reasoning_gym/../os"}, "instance.module"),
        ({"task": "coin_flip"}, "instance.task"),
        ({"index": -1}, "instance.index"),
    ],
)
def test_a_task_that_cannot_be_made_again_is_refused(nothing_installed, change, path):
    python = REASONING_GYM.folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(InvalidFieldError) as caught:
        ReasoningGym().check(TASK | change)
    assert [field.path for field in caught.value.fields] == [path]


@pytest.mark.parametrize(
    ("task", "answer", "harmless"),
    [
        ("countdown", "94*4 - (61 + 6)", True),
        ("polynomial_multiplication", "x**2 + 3*x*y - 1.5", True),
        ("simple_integration", "sqrt(x) + sin(2*x)/2 + C", True),
        ("countdown", "9**9**9**9", True),
        ("countdown", "exit()", False),
        ("countdown", "__import__('os').system('id')", False),
        ("countdown", "(exec)(x)", False),
        ("countdown", "S('exit()')", False),
        ("countdown", "x.evalf", False),
        ("countdown", "\uff45\uff58\uff45\uff43(1)", False),
        ("countdown", "lambda: 1", False),
        ("string_insertion", "ABCDEA", True),
        ("string_insertion", "['A', 'B']", True),
        ("string_insertion", "entry['answer']", False),
        ("string_insertion", "answer", False),
        ("string_insertion", "['A'] and exit()", False),
        ("string_insertion", "[c for c in entry['answer']]", False),
        ("string_insertion", "f'{entry}'", False),
        ("binary_matrix", "0 1\n1 0", True),
        ("binary_matrix", "[[0, 1], [-1, 0]]", True),
        ("n_queens", "_ Q\nQ _", True),
        ("n_queens", "  \tprint(1)", False),
        ("prime_factorization", "__import__('os')", True),
    ],
)
def test_only_literals_and_arithmetic_of_an_answer_are_evaluated(task, answer, harmless):
    assert is_harmless(task, answer) is harmless


@given(st.sampled_from(["countdown", "n_queens"]), st.text(max_size=60))
def test_any_text_is_judged_harmless_or_not(task, answer):
    assert is_harmless(task, answer) in (True, False)


@pytest.mark.parametrize("module", ["os", "reasoning_gym.a-b", "reasoning_gymnastics.x"])
def test_no_other_module_is_imported(module):
    with pytest.raises(ValueError, match="is not a module of reasoning-gym"):
        import_alone(module)


def test_the_last_answer_counts():
    assert final_answer("<answer>1</answer> no: <answer> 2\n3 </answer>") == "2\n3"
    assert final_answer("<answer>1") is None
    assert final_answer(None) is None
    assert final_answer("<answer>1<answer>2</answer> </answer><answer>") == "1<answer>2"
    begun = time.process_time()
    assert final_answer("<answer>x</answer>" * 20_000 + "<answer>" * 20_000) == "x"
    assert time.process_time() - begun < 1


READY, SCORE = b'{"ready": true}\n', b'{"score": 0.5}\n'


def result(stdout: bytes, exit_code: int | None = 0, stderr: bytes = b"") -> ExecResult:
    return ExecResult(exit_code, stdout, stderr, timed_out=exit_code is None, truncated=False)


@pytest.mark.parametrize(
    ("ran", "reward", "part"),
    [
        (result(READY + SCORE), 0.5, "answered"),
        (result(READY + b'{"score": 0.0, "raised": "ValueError"}\n'), 0.0, "raised"),
        (result(READY + b'{"score": 0.0, "refused": true}\n'), 0.0, "refused"),
        (result(READY, 152), 0.0, "too_costly"),
        (result(READY, 137), 0.0, "too_costly"),
    ],
)
def test_what_the_answer_did_is_a_score(ran, reward, part):
    score = read_score(ran)
    assert (score.reward, score.parts[part]) == (reward, 1.0)


@pytest.mark.parametrize(
    ("ran", "why"),
    [
        (result(SCORE), "no score"),
        (result(b'{"error": "ImportError: numpy"}\n'), "ImportError: numpy"),
        (result(b"", 137), "took too long"),
        (result(READY, None), "took too long"),
        (result(b"", 127, b"python3: not found"), "python3: not found"),
        (result(READY + b"{"), "no score"),
        (result(READY + b"[" * 100_000), "no score"),
    ],
)
def test_what_the_library_did_is_a_failure(ran, why):
    with pytest.raises(EnvironmentFailedError, match=why):
        read_score(ran)


def test_the_worker_needs_nothing_but_the_standard_library():
    worker = Path(sys.modules[is_harmless.__module__].__file__ or "")
    request = json.dumps({"op": "generate"}) + "\n"
    command = [sys.executable, "-I", "-S", "-c", worker.read_text(), "/nowhere"]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=True)
    assert "No module named 'reasoning_gym'" in json.loads(done.stdout)["error"]


def test_the_reward_of_an_illegal_move_is_the_number():
    said = []
    state = SimpleNamespace(set_invalid_move=lambda reason, reward: said.append((reason, reward)))
    put_in_order(state)
    state.set_invalid_move(0.25, "no such cup")
    state.set_invalid_move("no such cup", reward=0.5)
    state.set_invalid_move(reason="no such cup")
    assert said == [("no such cup", 0.25), ("no such cup", 0.5), ("no such cup", -1.0)]

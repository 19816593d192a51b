"""With the real library, rewards are those of its own scorers, and answers that attack the scorer gain nothing."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.environments.bridges.process import library_process
from rollout_service.environments.bridges.reasoning_gym.environment import ReasoningGym
from rollout_service.environments.bridges.reasoning_gym.generate import REASONING_GYM, WORKER, generate
from rollout_service.environments.dataset_files import count_splits
from rollout_service.episodes import Score
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn

pytestmark = [pytest.mark.apptainer, pytest.mark.bridges]
SEED = 11
ANSWERS = {
    "countdown": ["1 + 1", "no idea", "2**0.5 +"],
    "leg_counting": ["0"],
    "string_insertion": ["entry['answer']"],
    "prime_factorization": ["I do not know"],
}
"""Answers to each task besides the right one."""
MADE_AGAIN = ("arc_agi", "isomorphic_strings", "ransom_note")
"""Tasks whose entries JSON changes, and tasks that depend on the order of sets."""
SCORE = """
import json, sys
import reasoning_gym
for line in sys.stdin:
    task, seed, answer = json.loads(line)
    dataset = reasoning_gym.create_dataset(task, seed=seed, size=1)
    try:
        score = dataset.score_answer(answer, dataset[0])
    except Exception:
        score = None
    print(json.dumps({"score": score}), flush=True)
"""


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program that makes tasks."""
    command = [sys.executable, "-m", generate.__module__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["countdwn"],
            "there is no task 'countdwn' that can be scored; did you mean countdown?\nIts tasks: ab, ",
        ),
        (["coin_flip"], "there is no task 'coin_flip' that can be scored"),
        (["countdown", "--size", "0"], "argument --size: '0' is not a number of 1 or more"),
        (["countdown", "--config", "{bad"], "argument --config: '{bad' is not JSON"),
        (["countdown", "--config", "[1]"], "argument --config: '[1]' is not a JSON object"),
        (["countdown", "--config", '{"nope": 1}'], "unexpected keyword argument 'nope'"),
    ],
)
def test_a_mistake_in_a_command_is_named_without_a_traceback(arguments, said):
    done = make(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_tasks_are_printed_one_a_line():
    tasks = [json.loads(line) for line in make("countdown", "--size", "2", "--seed", "7").stdout.splitlines()]
    assert [(task["task"], task["seed"], task["index"]) for task in tasks] == [
        ("countdown", 7, 0),
        ("countdown", 7, 1),
    ]


class Scorer:
    """The library alone, in a process of its own."""

    def __init__(self) -> None:
        command = [str(REASONING_GYM.python()), "-I", "-c", SCORE]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def score(self, task: str, answer: str) -> float | None:
        """Return what the library gives an answer, or None if it raises."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([task, SEED, answer]) + "\n")
        self.process.stdin.flush()
        score: float | None = json.loads(self.process.stdout.readline())["score"]
        return score


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    scorer = Scorer()
    yield scorer
    scorer.process.kill()
    scorer.process.communicate()


@pytest.fixture(scope="module")
def instances() -> dict[str, dict[str, Any]]:
    async def make() -> dict[str, dict[str, Any]]:
        async with library_process([REASONING_GYM.python(), "-I", WORKER], "reasoning-gym") as process:
            return {task: (await generate(process, task, seed=SEED, size=1))[0] for task in (*ANSWERS, *MADE_AGAIN)}

    return anyio.run(make)


async def score(sandboxes: SandboxSource, instance: dict[str, Any], answer: str, cpu_seconds: int = 20) -> Score:
    policy = ScriptedPolicy([f"Hm.\n<answer>{answer}</answer>"])
    return (await play(ReasoningGym(cpu_seconds=cpu_seconds), instance, policy, sandboxes)).score


@pytest.mark.parametrize("task", ["countdown", "leg_counting"])
async def test_rewards_are_those_of_the_library(sandboxes, scorer, instances, task):
    answers = [instances[task]["answer"], *ANSWERS[task]]
    expected = [scorer.score(task, answer) for answer in answers]
    assert expected[0] == 1.0
    assert [(await score(sandboxes, instances[task], answer)).reward for answer in answers] == expected


@pytest.mark.parametrize("task", MADE_AGAIN)
async def test_a_task_is_made_again_as_it_was(sandboxes, instances, task):
    assert (await score(sandboxes, instances[task], instances[task]["answer"])).reward == 1.0


async def test_an_answer_at_which_the_scorer_raises_is_wrong(sandboxes, scorer, instances):
    [prose] = ANSWERS["prime_factorization"]
    assert scorer.score("prime_factorization", prose) is None
    found = await score(sandboxes, instances["prime_factorization"], prose)
    assert (found.reward, found.parts["raised"]) == (0.0, 1.0)


async def test_answers_that_attack_the_scorer_gain_nothing(sandboxes, scorer, instances):
    endless = await score(sandboxes, instances["countdown"], "9**9**9**9", cpu_seconds=10)
    assert (endless.reward, endless.parts.get("too_costly") or endless.parts.get("raised")) == (0.0, 1.0)
    [attack] = ANSWERS["string_insertion"]
    assert scorer.score("string_insertion", attack) == 0.1
    forged = await score(sandboxes, instances["string_insertion"], attack)
    assert (forged.reward, forged.parts["refused"]) == (0.0, 1.0)


async def test_a_task_that_was_changed_fails_instead_of_scoring(sandboxes, instances):
    with pytest.raises(EnvironmentFailedError, match="another version"):
        await score(sandboxes, {**instances["leg_counting"], "question": "How many legs?"}, "4")


def test_the_data_set_has_both_splits_of_every_task():
    tasks = ReasoningGym().dataset()
    splits = count_splits(tasks)
    names = {task["task"] for task in tasks}
    assert len(names) > 95
    assert splits.keys() == {"train", "held_out"}
    assert min(splits.values()) > 95
    assert not {task["question"] for task in tasks if task["split"] == "train"} & {
        task["question"] for task in tasks if task["split"] == "held_out"
    }


@pytest.fixture(scope="module")
def chain_sum() -> ReasoningGym:
    folder = Path(__file__).parents[3] / "examples" / "environments" / "chain_sum"
    [plug_in] = Distribution.at(folder / "chain_sum_environment-1.0.dist-info").entry_points
    sys.path.insert(0, str(folder))
    try:
        return cast("ReasoningGym", plug_in.load())
    finally:
        sys.path.remove(str(folder))


def test_the_example_has_sums_of_the_library_in_two_splits(chain_sum):
    tasks = chain_sum.dataset()
    splits = count_splits(tasks)
    assert splits["held_out"] == 128
    assert splits["train"] > 1_900
    assert len({task["question"] for task in tasks}) == len(tasks)
    chain_sum.check(tasks[0])


@pytest.mark.parametrize(("added", "expected"), [(0, 1.0), (1, 0.0)])
async def test_the_example_has_a_tool_and_scores_the_box(sandboxes, chain_sum, added, expected):
    task = chain_sum.dataset()[0]
    expression = str(task["question"]).partition(": ")[2].removesuffix(" =")
    said = [
        turn("", call("python", code=f"print({expression})")),
        f"\\boxed{{{int(str(task['answer'])) + added}}}",
    ]
    policy = ScriptedPolicy(said)
    played = await play(chain_sum, task, policy, sandboxes)
    assert [message.content for message in policy.messages if message.role == "tool"] == [task["answer"]]
    assert played.score.reward == expected

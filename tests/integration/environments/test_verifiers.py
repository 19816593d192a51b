"""With the real library, tasks of verifiers give their own rewards, and those that could not are refused."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import ForkReason, Segment, Trajectory
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.bridges.verifiers.catalog import VERIFIERS
from rollout_service.environments.bridges.verifiers.declaration import TasksetTable
from rollout_service.environments.bridges.verifiers.environment import VerifiersEnvironment, load_verifiers
from rollout_service.environments.dataset_files import count_splits
from rollout_service.pipeline.trial import Trial, play
from rollout_service.testing.scripted_policy import ScriptedPolicy, ScriptedTurn, call, turn

pytestmark = [pytest.mark.apptainer, pytest.mark.bridges]
FOLDER = Path(__file__).parents[2] / "fixtures" / "verifiers"
CALLS = [turn("", *(call("calc_square", number=number) for number in (40, 12, 500))), "It is 144"]
PLAYS: dict[str, tuple[str, int, int, list[ScriptedTurn]]] = {
    "with tools": ("vf_squares", 2, 1, CALLS),
    "with a system prompt": ("vf_letters", 0, 2, ["aaabnn"]),
    "with a longer prompt": ("vf_letters", 1, 3, ["bde, I think"]),
}
"""The taskset, the index of a task, how many messages its prompt has, and what a policy answers."""
ALONE = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import Response
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
sys.modules["vf_letters"], sys.modules["vf_squares"] = __import__("vf_letters"), __import__("vf_squares")
from vf_squares import Calls

async def score(taskset, index, messages, config, seen):
    tasks = load_taskset(taskset_config_type(taskset).model_validate({"id": taskset, **config}))
    task = list(tasks)[index]
    first = [vf.SystemMessage(content=task.data.system_prompt)] if task.data.system_prompt else []
    prompt = task.data.prompt
    first += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
    agent = AgentInfo(config=vf.AgentConfig(model="m", harness={"id": "null"}))
    trace = vf.Trace(task=TraceTask(type="T", data=task.data), agent=agent)
    trace.state = Calls(seen=seen) if taskset == "vf_squares" else vf.State()
    for message in messages:
        if message["role"] == "tool":
            first.append(vf.ToolMessage(tool_call_id=message["id"], content=message["content"]))
            continue
        calls = [vf.ToolCall(id=i, name=n, arguments=a) for i, n, a in message["calls"]] or None
        reply = vf.AssistantMessage(content=message["content"], tool_calls=calls)
        answer = Response(id="1", created=1, model="m", message=reply, finish_reason="stop")
        graph.prepare_turn(trace, first, []).commit(answer)
        first.append(reply)
    await task.score(trace)
    return {"reward": trace.reward, "rewards": {name: one.score for name, one in trace.rewards.items()},
            "metrics": trace.metrics}

async def main():
    return [await score(*play) for play in json.loads(sys.stdin.read())]

print("\\nREPLY", json.dumps(asyncio.run(main())))
"""
"""Scores conversations as the library does by itself: with its own loader, and none of the bridge's code."""
TEMPLATE = """
import verifiers.v1 as vf
__all__ = ["Some", *EXPORTS] if (EXPORTS := {exports}) else ["Some"]
class One(vf.Task):
    {body}
    @vf.reward
    async def fine(self, trace) -> float:
        return 1.0
class Some(vf.Taskset[One, vf.TasksetConfig]):
    def load(self):
        return [One(vf.TaskData(prompt="x"), self.config.task)]
{more}
"""
REFUSED: dict[str, tuple[str, str, list[str], str]] = {
    "asks for a runtime": (
        "@vf.reward\n    async def file(self, runtime) -> float: return 1.0",
        "",
        [],
        "its hook file asks for `runtime`",
    ),
    "may take a runtime": (
        "@vf.metric\n    async def size(self, trace, runtime=None) -> float: return 1.0",
        "",
        [],
        "its hook size asks for `runtime`",
    ),
    "prepares a runtime": (
        "async def setup(self, trace, runtime): pass",
        "",
        [],
        "One.setup prepares a runtime",
    ),
    "reads a runtime": (
        "async def finalize(self, trace, runtime): pass",
        "",
        [],
        "One.finalize reads a runtime",
    ),
    "scores by itself": ("async def score(self, trace, runtime=None): pass", "", [], "One.score scores"),
    "stops": (
        "@vf.stop\n    async def enough(self, trace: vf.Trace) -> bool: return True",
        "",
        [],
        "its hook enough stops or rewrites",
    ),
    "runs by itself": (
        "",
        "class Own(vf.Env[vf.EnvConfig]):\n    async def run(self, task, agents): pass",
        ["Own"],
        "its environment Own runs its episodes itself",
    ),
    "cannot be imported": ("", "import a_module_that_is_not_there", [], "a_module_that_is_not_there"),
    "has no tasks": ("", "Some.load = lambda self: []", [], "it has no tasks"),
}
"""The task's body, what follows the taskset, what else the module exports, and why it is refused."""


class SamplingPolicy(ScriptedPolicy):
    """Plays a script of one turn, with token ids."""

    def trajectory(self) -> Trajectory:
        """Return the messages, and two tokens that were read before four that were sampled."""
        segment = Segment(
            token_ids=[1, 2, 30, 31, 32, 33],
            loss_mask=[0, 0, 1, 1, 1, 1],
            logprobs=[0.0, 0.0, -0.5, -0.5, -0.5, -0.5],
            versions=[-1, -1, 1, 1, 1, 1],
            turn_ids=[-1, -1, 0, 0, 0, 0],
            fork_reason=ForkReason.FIRST,
        )
        return super().trajectory().model_copy(update={"segments": [segment]})


POLICIES = {"with a system prompt": SamplingPolicy}


@pytest.fixture(scope="module")
def environment() -> VerifiersEnvironment:
    return load_verifiers(FOLDER)


def instance_of(environment: VerifiersEnvironment, taskset: str, index: int) -> dict[str, JsonValue]:
    return next(one for one in environment.dataset() if (one["taskset"], one["index"]) == (taskset, index))


def alone(trials: dict[str, Trial]) -> dict[str, dict[str, Any]]:
    """Return what the library gives the same conversations, in a process of its own."""
    wanted = []
    for name, trial in trials.items():
        taskset, index, first, _ = PLAYS[name]
        messages = [
            {
                "role": message.role,
                "content": message.content,
                "id": message.tool_call_id,
                "calls": [[one.id, one.name, json.dumps(one.arguments)] for one in message.tool_calls],
            }
            for message in trial.episode.policy.messages[first:]
        ]
        config = {"numbers": [3, 4, 12]} if taskset == "vf_squares" else {}
        wanted.append([taskset, index, messages, config, [40, 12]])
    done = subprocess.run(
        [VERIFIERS.python(), "-I", "-c", ALONE, str(FOLDER)],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(trials, json.loads(done.stdout.rpartition("REPLY")[2]), strict=True))


@pytest.mark.timeout(600)  # it imports the library five times
async def test_rewards_are_the_librarys_own(environment, sandboxes):
    trials = {
        name: await play(
            environment,
            instance_of(environment, taskset, index),
            POLICIES.get(name, ScriptedPolicy)(says),
            sandboxes,
        )
        for name, (taskset, index, _, says) in PLAYS.items()
    }
    for name, expected in alone(trials).items():
        score = trials[name].score
        assert trials[name].stop_reason is StopReason.ANSWERED
        assert score.reward == pytest.approx(expected["reward"])
        metrics = {f"metric_{n}" if n in expected["rewards"] else n: v for n, v in expected["metrics"].items()}
        sampled = {"sampled": 4.0, "output": 4.0} if name in POLICIES else {}
        assert score.parts == pytest.approx(expected["rewards"] | metrics | sampled)
    assert trials["with tools"].score.reward == 1.75  # 2 for the answer, less a quarter for a wasted call
    results = [one.content for one in trials["with tools"].episode.policy.messages if one.role == "tool"]
    assert results[:2] == ["1600", "144"]
    assert "that is far more than the task asks for" in results[2]
    assert trials["with a system prompt"].episode.policy.messages[0].content == "Sort the letters."
    assert trials["with a longer prompt"].score.parts["turns"] == 1.0


async def test_a_reward_that_fails_is_a_failure_and_no_zero(environment, sandboxes):
    instance = instance_of(environment, "vf_letters", 0)
    with pytest.raises(EnvironmentFailedError, match="the judgment is not available"):
        await play(environment, instance, ScriptedPolicy(["crash"]), sandboxes)


def test_the_data_set_leaves_out_what_cannot_be_run(environment):
    assert count_splits(environment.dataset()) == {"train": 3, "held_out": 2}
    assert environment.findings() == []
    (warning,) = environment.warnings()
    assert "1 tasks of 'vf_letters'" in warning
    assert "it asks for a container, with its field 'image'" in warning


def test_a_task_has_its_tools_and_its_time(environment):
    with_tools = environment.for_instance(instance_of(environment, "vf_squares", 0))
    (tool,) = with_tools.tool_definitions()
    assert tool["function"]["name"] == "calc_square"
    assert tool["function"]["description"] == "Square a number."
    assert tool["function"]["parameters"]["required"] == ["number"]
    without = environment.for_instance(instance_of(environment, "vf_letters", 1))
    assert without.tool_definitions() == []
    assert without.spec.limits.agent_seconds == 12.5
    assert (with_tools.replayable, without.replayable) == ("tools", "never")
    assert environment.spec.limits.agent_seconds == 900.0


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ({"taskset": "vf_square"}, "instance.taskset", "did you mean vf_squares"),
        ({"taskset": None}, "instance.taskset", "the taskset is not named"),
        ({"index": 3}, "instance.index", "has the tasks 0 to 2"),
        ({"index": -1}, "instance.index", "has the tasks 0 to 2"),
        ({"index": 2, "taskset": "vf_letters"}, "instance.index", "cannot be run here"),
        ({"key": "0" * 64}, "instance.key", "is another one now"),
        ({"index": "first"}, "instance.index", "integer"),
    ],
)
def test_a_task_that_there_is_not_is_refused(environment, change, path, message):
    instance: dict[str, JsonValue] = {"taskset": "vf_squares", "index": 0} | change
    with pytest.raises(InvalidFieldError) as caught:
        environment.check(instance)
    assert [field.path for field in caught.value.fields] == [path]
    assert message in caught.value.fields[0].message


def test_tasksets_whose_rewards_would_be_left_out_are_refused_with_the_reason(tmp_path):
    tables = []
    for number, (body, more, exports, _) in enumerate(REFUSED.values()):
        text = TEMPLATE.format(body=body or "pass", more=more, exports=exports)
        (tmp_path / f"vf_refused_{number}.py").write_text(text)
        tables.append(TasksetTable(id=f"vf_refused_{number}"))
    tables.append(TasksetTable(id="harbor"))  # comes with the library
    lines = "".join(f'[[taskset]]\nid = "{table.id}"\n' for table in tables)
    (tmp_path / "environment.toml").write_text(f'kind = "verifiers"\n{lines}')
    environment = load_verifiers(tmp_path)
    assert environment.dataset() == []
    reasons = [*(reason for *_, reason in REFUSED.values()), "'harbor' cannot be used"]
    for table, reason, finding in zip(tables, reasons, environment.findings(), strict=True):
        assert reason in finding
        with pytest.raises(InvalidFieldError) as caught:
            environment.check({"taskset": table.id, "index": 0})
        assert caught.value.fields[0].path == "instance.taskset"
        assert reason in caught.value.fields[0].message


OLD = """
import verifiers as vf
from datasets import Dataset

def load_environment(**options):
    return vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "x", "answer": "y"}]), rubric=vf.Rubric())
"""


def test_a_package_in_the_old_form_is_refused_with_the_way_to_the_new_one(tmp_path):
    (tmp_path / "old_words.py").write_text(OLD)
    (tmp_path / "old_package").mkdir()
    (tmp_path / "old_package" / "__init__.py").write_text("from .main import load_environment\n")
    (tmp_path / "old_package" / "main.py").write_text(OLD)
    (tmp_path / "environment.toml").write_text(
        'kind = "verifiers"\n[[taskset]]\nid = "old-words"\n[[taskset]]\nid = "old_package"\n'
    )
    findings = load_verifiers(tmp_path).findings()
    assert len(findings) == 2
    for finding in findings:
        assert "in the old form, with `load_environment`, which verifiers 0." in finding
        assert "docs/how-to/bridge-verifiers.md" in finding


@pytest.fixture
def backwards(tmp_path: Path) -> VerifiersEnvironment:
    """The taskset that the documentation shows."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "bridge-verifiers.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    tmp_path.chmod(0o755)  # the user of a sandbox is another one
    (tmp_path / "backwards.py").write_text(code)
    (tmp_path / "environment.toml").write_text('kind = "verifiers"\n[[taskset]]\nid = "backwards"\n')
    return load_verifiers(tmp_path)


async def test_the_taskset_of_the_documentation(backwards, sandboxes):
    assert backwards.findings() == []
    trial = await play(backwards, backwards.dataset()[1], ScriptedPolicy(["revir"]), sandboxes)
    assert trial.score.reward == 1.0

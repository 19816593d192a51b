"""Both training environments are found as plug-ins, and `steps` needs its tool more than once."""

import importlib.util
import re
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.environments.builtin.calc import evaluate_expression
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from sandboxes import LocalConfig, make_provider

FOLDER = Path(__file__).parents[3] / "examples" / "environments" / "arithmetic"
NUMBER = st.integers(0, 9999).map(str)
EXPRESSIONS = st.builds(
    lambda first, rest: first + "".join(map("".join, rest)),
    NUMBER,
    st.lists(st.tuples(st.sampled_from("+-*"), NUMBER), max_size=4),
)


PLUG_INS = Distribution.at(FOLDER / "arithmetic_environments-1.0.dist-info").entry_points


def load():
    """Load the plug-in's module without its folder on the path, where other tests would find its environments."""
    spec = importlib.util.spec_from_file_location(
        "arithmetic_environments", FOLDER / "arithmetic_environments.py"
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


arithmetic = load()


async def trial(folder: Path, name: str, question: str, answer: str, *said: str):
    """Play a rollout whose policy asks for these expressions, one per turn, and then gives the answer."""
    registry = EnvironmentRegistry.load(plugins=PLUG_INS)
    provider = make_provider(LocalConfig(provider="local"), folder)
    policy = ScriptedPolicy([*(turn("", call("python", code=f"print({each})")) for each in said), answer])
    instance = {"question": question, "answer": "14"}
    try:
        played = await play(registry.get(name), instance, policy, SandboxSource(provider))
    finally:
        await provider.close()
    return played, [message.content for message in policy.messages if message.role == "tool"]


async def test_the_steps_tool_must_be_called_for_each_operation(tmp_path):
    played, told = await trial(tmp_path, "steps", "2+3*4", "\\boxed{14}", "2+3*4", "2+3*4", "2+3*4")
    assert told == [arithmetic.KILLED, "14", "14"]
    assert played.score.reward == 1.0


async def test_another_expression_starts_over(tmp_path):
    _, told = await trial(
        tmp_path, "steps", "2+3*4", "?", "2+3*4", "9-3-1", "9-3-1", "0007", "__import__('os')"
    )
    assert told[:4] == [arithmetic.KILLED, arithmetic.KILLED, "5", "7"]
    assert "SyntaxError" in told[4]


async def test_slow_gives_the_whole_result_at_once(tmp_path, monkeypatch):
    registry = EnvironmentRegistry.load(plugins=PLUG_INS)
    assert {each.spec.name for each in registry.list()} == {"slow", "steps"}
    monkeypatch.setattr(arithmetic, "TYPICAL_SECONDS", 0.0)
    played, told = await trial(tmp_path, "slow", "2+3*4", "\\boxed{14}", "2 + 3*4")
    assert told == ["14"]
    assert played.score.reward == 1.0


@pytest.mark.slow
async def test_the_tasks_have_two_operations_and_two_sides():
    tasks = arithmetic.steps.dataset()
    sides = {name: [each for each in tasks if each["split"] == name] for name in ("train", "held_out")}
    assert len(sides["train"]) == 2048
    assert len(sides["held_out"]) == 128
    for each in tasks:
        arithmetic.steps.check(each)
        expression = re.search(r"\d+(\s*[-+*]\s*\d+)+", each["question"])
        assert len(re.findall(r"[-+*]", expression[0])) == 2


@given(EXPRESSIONS)
def test_operation_by_operation_is_the_value(expression):
    left, calls = expression, 0
    while not arithmetic.is_number(left):
        left = re.sub(
            r"\$\(\((.+)\)\)",
            lambda match: str(evaluate_expression(match[1])),
            arithmetic.next_operation(left),
        )
        calls += 1
    assert int(left) == evaluate_expression(expression)
    assert calls == len(re.findall(r"[-+*]", expression))

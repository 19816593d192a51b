"""Groups for the Tinker cookbook keep turns exact, name what they cannot do, and never shorten a group."""

from abc import ABC
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from api_schemas.rollouts import RolloutState, StopReason
from api_schemas.trajectories import FinishReason
from rollout_client.adapters import tinker
from rollout_client.adapters.samples import samples_of, turns_of
from rollout_client.adapters.submit import TaskRowError
from tests.support.adapters.modules import modules
from tests.support.adapters.rollouts import TASK, FakeClient, rollout, segment

pytestmark = pytest.mark.anyio

ROW = TASK.model_dump(mode="json")
TWO_TURNS = segment([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 0, 1])
POLICY = SimpleNamespace(temperature=0.5, max_tokens=64)


class AllTrajectoriesFailedError(Exception):
    """The cookbook's error for a group that it drops."""


@dataclass
class Transition:
    """The cookbook's `Transition`."""

    ob: Any
    ac: Any
    reward: float
    episode_done: bool
    metrics: dict = field(default_factory=dict)
    logs: dict = field(default_factory=dict)


@pytest.fixture
def cookbook(monkeypatch):
    """Install stand-ins of the classes of the cookbook that the adapter uses; they refuse unknown fields."""
    base = type("Base", (ABC,), {})
    tokens = dataclass(type("T", (), {"__annotations__": {"tokens": list, "maybe_logprobs": list, "stop_reason": str}}))
    trajectory = {"transitions": list, "final_ob": Any, "stop_reason": Any}
    result = {"trajectories": list, "envs": list, "errors": list}
    error = {"error_type": str, "error_message": str}
    made = [dataclass(type("D", (), {"__annotations__": one})) for one in (trajectory, result, error)]
    inputs = SimpleNamespace(from_ints=list, empty=list)
    modules(monkeypatch, "tinker", ModelInput=inputs)
    modules(monkeypatch, "tinker_cookbook.exceptions", AllTrajectoriesFailedError=AllTrajectoriesFailedError)
    modules(monkeypatch, "tinker_cookbook.completers", TokensWithLogprobs=tokens)
    modules(monkeypatch, "tinker_cookbook.rl.rollout_strategy", RolloutResult=made[1], RolloutStrategy=base)
    types = {"Env": base, "EnvGroupBuilder": base, "Transition": Transition}
    modules(monkeypatch, "tinker_cookbook.rl.types", Trajectory=made[0], RolloutError=made[2], **types)
    tinker.make_classes.cache_clear()
    yield
    tinker.make_classes.cache_clear()


def test_each_turn_has_the_prompt_that_the_engine_read():
    one = rollout(TWO_TURNS, segment([1, 9, 5], [0, 0, 1], parent=0))
    turns = [(turn.prompt_ids, turn.sampled_ids, turn.logprobs) for row in samples_of(one) for turn in turns_of(row)]
    assert turns == [
        ([1, 2], [3, 4], [-0.3, -0.4]),
        ([1, 2, 3, 4, 5, 6], [7], [-0.7]),
        ([1, 9], [5], [-0.5]),
    ]


async def test_a_group_is_run_at_the_service(cookbook):
    client = FakeClient(rollout(TWO_TURNS), rollout(TWO_TURNS, reward=0.0, stop_reason=StopReason.MAX_TURNS))
    group = tinker.RolloutGroup(ROW, 2, client.submitter())
    result = await tinker.ServiceStrategy().execute(group, POLICY)
    assert [[one.reward for one in each.transitions] for each in result.trajectories] == [
        [0.0, 1.0],
        [0.0, 0.0],
    ]
    assert [[one.episode_done for one in each.transitions] for each in result.trajectories] == [[False, True]] * 2
    assert [each.stop_reason for each in result.trajectories] == ["completed", "max_turns"]
    assert result.trajectories[1].transitions[-1].metrics == {"stop/max_turns": 1.0}
    assert result.errors == []
    assert {one.limits.max_turn_tokens for one in client.requests} == {64}
    assert {one.sampling.temperature for one in client.requests} == {0.5}
    assert len({one.rollout_id for one in client.requests}) == 2
    metrics = await group.compute_group_rewards(result.trajectories, result.envs)
    assert metrics == [(0.0, {"rollouts/segments": 1.0, "rollouts/turns": 0.0})] * 2
    assert group.logging_tags() == ["calc"]


async def test_a_turn_that_was_cut_off_says_so(cookbook):
    one = rollout(TWO_TURNS)
    reasons = [FinishReason.STOP, FinishReason.LENGTH]
    one = one.model_copy(update={"trajectory": one.trajectory.model_copy(update={"finish_reasons": reasons})})
    assert [turn.ac.stop_reason for turn in tinker.trajectory_of(one).transitions] == ["stop", "length"]


async def test_a_rollout_without_a_reward_is_counted_and_then_drops_its_group(cookbook):
    failed = rollout(reward=None, state=RolloutState.FAILED)
    client = FakeClient(failed, rollout(TWO_TURNS))
    group = tinker.RolloutGroup(ROW, 1, client.submitter(retries=1))
    result = await tinker.ServiceStrategy().execute(group, POLICY)
    (error,) = result.errors
    assert (error.error_type, "no memory" in error.error_message) == ("NoRewardError", True)
    client.answers = [failed] * 2
    with pytest.raises(AllTrajectoriesFailedError, match="Its group is dropped"):
        await tinker.ServiceStrategy().execute(group, POLICY)
    assert tinker.ServiceStrategy().catches_group_errors


async def test_another_strategy_is_told_which_to_use(cookbook):
    (env,) = await tinker.RolloutGroup(ROW, 1, FakeClient().submitter()).make_envs()
    with pytest.raises(NotImplementedError, match="rollout_error_tolerance=ServiceStrategy"):
        await env.initial_observation()


def test_a_bad_row_is_refused_before_any_group_runs(cookbook):
    with pytest.raises(TaskRowError):
        tinker.RolloutGroup({"question": "2+2"}, 2, FakeClient().submitter())

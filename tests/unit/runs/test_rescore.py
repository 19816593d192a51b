"""Finished rollouts are rescored from their tool calls, without an engine, and keep their old reward."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from api_schemas.exports import RecordedRollout, Rescored, RescoreRollouts, without_tokens
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, StopReason
from api_schemas.rollouts.trees import Assigns
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, ForkReason
from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError, InvalidFieldError
from rollout_service.engines.serving.replay import RecordedPolicy
from rollout_service.environments.builtin import calc
from rollout_service.environments.builtin.code import environment as code
from rollout_service.environments.contract import Environment, EnvironmentSpec
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.episodes import Episode, Policy, Score
from rollout_service.pipeline.context import AttemptContext
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.runs.rescore import Rescorer
from rollout_service.settings import PipelineSettings
from rollout_service.store.sqlite import SqliteStore
from rollout_service.testing.scripted_policy import ScriptedPolicy, ScriptedTurn, call, malformed_call, turn
from sandboxes import LocalConfig, make_provider
from tests.support.attempts import OpenedPolicies, attempt_context
from tests.support.samples import segment
from tests.support.store.trees import WORK, bare
from tests.support.store.trees import rollout as tree_of

pytestmark = pytest.mark.slow

QUESTION = {"question": "2 + 2", "answer": 4}
SQUARE = {"question": "?", "kind": "assert", "tests": ["assert f(3) == 9"]}
RIGHT = [turn("", call("write", path="solution.py", content="def f(x): return x * x")), "Done."]


class Lenient(code.Code):
    """A newer version of `code`, which rewards half the share of passed tests."""

    async def evaluate(self, episode: Episode) -> Score:
        score = await super().evaluate(episode)
        return replace(score, reward=score.parts["tests_passed"] / 2)


class Broken(calc.Calc):
    async def evaluate(self, episode: Episode) -> Score:
        if episode.answer == "nan":
            return Score(float("nan"))
        raise EnvironmentFailedError("the grader is gone")


class Looking(calc.Calc):
    """Does not declare that the answer alone is enough."""

    replayable = "tools"


class Elsewhere(calc.Calc):
    """Depends on something that no tool call recreates."""

    replayable = "never"


class Divided(calc.Calc):
    """Scores how the work was divided."""

    async def evaluate(self, episode: Episode) -> Score:
        return Score(float(episode.work.critical_steps), {"nodes": float(len(episode.nodes))})


def renamed(spec: EnvironmentSpec, name: str) -> EnvironmentSpec:
    return spec.model_copy(update={"name": name})


def _refused(*_: object) -> Policy:
    pytest.fail("an engine was asked")


class Bench:
    def __init__(self, context: AttemptContext, policies: OpenedPolicies) -> None:
        self._context = context
        self._policies = policies
        self.checked: list[str] = []
        self.rescorer = Rescorer(context, self._check)

    async def _check(self, name: str) -> None:
        self.checked.append(name)
        self._context.environments.get(name)

    async def roll_out(self, environment: str, instance: dict, script: Iterable[ScriptedTurn]) -> RecordedRollout:
        self._policies.opens = lambda *_: ScriptedPolicy(script)
        request = RolloutRequest(rollout_id="r", task=Task(environment=environment, instance=instance))
        await self._context.store.submit(request)
        rollout = await self._context.store.wait_for_result("r")
        trajectory = await self._context.store.trajectory("r")
        self._policies.opens = _refused
        return without_tokens(request, rollout.model_copy(update={"trajectory": trajectory}))

    async def rescore(self, recorded: RecordedRollout, **options: str) -> Rescored:
        order = RescoreRollouts.model_validate({"rollouts": [recorded], **options})
        (result,) = [one async for one in await self.rescorer.rescore_rollouts(order)]
        return result


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened(tmp_path) as made:
        yield made


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Bench]:
    provider = make_provider(LocalConfig(provider="local"), folder / "state")
    policies, settings = OpenedPolicies(_refused), PipelineSettings(max_attempts=1)
    registry = EnvironmentRegistry(
        [
            calc.environment,
            code.environment,
            Lenient(renamed(code.SPEC, "code-v2")),
            Broken(renamed(calc.SPEC, "broken")),
            Looking(renamed(calc.SPEC, "looking")),
            Elsewhere(renamed(calc.SPEC, "elsewhere")),
            Divided(renamed(calc.SPEC, "divided")),
        ]
    )
    try:
        async with await SqliteStore.open(":memory:") as store:
            context = attempt_context(store, provider, registry, policies, settings)
            async with Pipeline(context, settings).running():
                yield Bench(context, policies)
            stages = context.stages
            assert all(limiter.idle for limiter in (stages.init, stages.rollout, stages.evaluate))
            assert provider.live() == []
    finally:
        await provider.close()


async def test_a_program_is_written_and_tested_again(bench):
    recorded = await bench.roll_out("code", SQUARE, RIGHT)
    assert recorded.rollout.reward == 1.0
    result = await bench.rescore(recorded)
    assert (result.recorded_reward, result.reward, result.error) == (1.0, 1.0, None)
    assert result.reward_parts == recorded.rollout.reward_parts
    assert (result.replayed, result.turns_recorded, result.turns_replayed) == (True, 2, 2)
    assert result.differences == []


async def test_another_version_is_scored_next_to_the_old_reward(bench):
    recorded = await bench.roll_out("code", SQUARE, RIGHT)
    result = await bench.rescore(recorded, environment="code-v2")
    assert (result.environment, result.recorded_reward, result.reward) == ("code-v2", 1.0, 0.5)
    assert bench.checked == ["code-v2"]
    with pytest.raises(InvalidFieldError, match="code-v3"):
        await bench.rescore(recorded, environment="code-v3")


async def test_rewards_for_handing_on_work_stay_as_they_were(bench):
    recorded = await bench.roll_out("code", SQUARE, RIGHT)
    parts = {"perf": 1.0, "parallel": 0.5, "width": 1.0, "finish": 0.75}
    rollout = recorded.rollout.model_copy(update={"reward_parts": recorded.rollout.reward_parts | parts, "reward": 1.0})
    result = await bench.rescore(recorded.model_copy(update={"rollout": rollout}), environment="code-v2")
    assert result.reward_parts == rollout.reward_parts | {"perf": 0.5}


async def test_a_different_tool_output_is_reported(bench, tmp_path):
    path = tmp_path / "counter"
    path.write_text("1")
    script = [turn("", call("bash", command=f"cat {path}")), turn("", malformed_call()), *RIGHT]
    recorded = await bench.roll_out("code", SQUARE, script)
    path.write_text("2")
    result = await bench.rescore(recorded)
    assert (result.reward, result.turns_replayed) == (1.0, 4)
    (difference,) = result.differences
    assert (difference.turn, difference.name, difference.role) == (1, "bash", "tool")
    assert (difference.recorded, difference.replayed) == ("1", "2")


async def test_an_answer_alone_needs_no_sandbox(bench):
    script = [turn("", call("python", code="print(2 + 2)")), r"\boxed{4}"]
    recorded = await bench.roll_out("calc", QUESTION, script)
    result = await bench.rescore(recorded)
    assert (result.recorded_reward, result.reward, result.replayed) == (1.0, 1.0, False)
    again = await bench.rescore(recorded, replay="always")
    assert (again.reward, again.replayed, again.turns_replayed, again.differences) == (1.0, True, 2, [])


async def test_an_environment_declares_how_it_can_be_replayed(bench):
    recorded = await bench.roll_out("calc", QUESTION, [r"\boxed{4}"])
    looking = await bench.rescore(recorded, environment="looking")
    assert (looking.reward, looking.replayed, looking.turns_replayed) == (1.0, True, 1)
    for replay in ("needed", "always"):
        elsewhere = await bench.rescore(recorded, environment="elsewhere", replay=replay)
        assert (elsewhere.reward, elsewhere.error.code) == (None, "not_replayable")
    assert Environment.replayable == "tools"
    with pytest.raises(ConfigurationError, match="is scored in a sandbox"):
        calc.Calc(renamed(code.SPEC, "contradiction"))


async def test_a_failure_does_not_stop_others(bench):
    recorded = await bench.roll_out("calc", QUESTION, [r"\boxed{5}"])
    rollout = recorded.rollout
    cancelled = rollout.model_copy(update={"state": RolloutState.CANCELLED})
    pruned = rollout.model_copy(update={"trajectory": None})
    elsewhere = rollout.model_copy(update={"task": Task(environment="gone")})
    asked = [recorded.model_copy(update={"rollout": one}) for one in (cancelled, pruned, elsewhere, rollout)]
    results = [one async for one in await bench.rescorer.rescore_rollouts(RescoreRollouts(rollouts=asked))]
    assert [one.error and one.error.code for one in results] == [
        "not_replayable",
        "not_replayable",
        "invalid_field",
        None,
    ]
    assert [one.reward for one in results] == [None, None, None, 0.0]
    broken = await bench.rescore(recorded, environment="broken")
    assert (broken.reward, broken.error.code, broken.error.stage) == (None, "environment_failed", "evaluate")
    trajectory = rollout.trajectory
    answered = trajectory.messages[-1].model_copy(update={"content": "nan"})
    nan = trajectory.model_copy(update={"messages": [*trajectory.messages[:-1], answered]})
    odd = recorded.model_copy(update={"rollout": rollout.model_copy(update={"trajectory": nan})})
    assert (await bench.rescore(odd, environment="broken")).reward is None


async def test_a_history_that_was_replaced_is_not_replayed(bench):
    recorded = await bench.roll_out("code", SQUARE, RIGHT)
    trajectory = recorded.rollout.trajectory
    edited = trajectory.model_copy(update={"fork_counts": {ForkReason.COMPACTION: 1}})
    rollout = recorded.rollout.model_copy(update={"trajectory": edited})
    result = await bench.rescore(recorded.model_copy(update={"rollout": rollout}))
    assert (result.reward, result.error.code) == (None, "not_replayable")


async def test_tokens_count_as_they_once_did(bench):
    recorded = await bench.roll_out("code", SQUARE, RIGHT)
    trajectory = recorded.rollout.trajectory
    one = segment([1, 2, 3, 4], [0, 1, 1, 1], turn_ids=[-1, 0, 0, 1])
    reasons = [FinishReason.STOP, FinishReason.LENGTH]
    full = trajectory.model_copy(update={"segments": [one], "finish_reasons": reasons})
    update = {"trajectory": full, "stop_reason": StopReason.CONTEXT_FULL}
    rollout: Rollout = recorded.rollout.model_copy(update=update)
    bare = without_tokens(recorded.request, rollout)
    assert (bare.sampled_tokens, bare.rollout.trajectory.segments) == ([2, 1], [])
    whole = RecordedRollout(request=recorded.request, rollout=rollout)
    for one in (bare, whole):
        policy = RecordedPolicy(one, full)
        first = await policy.respond([], max_tokens=9)
        assert (first.truncated, policy.usage.sampled_tokens) == (False, 2)
        last = await policy.respond([], max_tokens=9)
        assert (last.truncated, last.context_full, policy.usage.sampled_tokens) == (True, True, 3)


async def test_the_recorded_sub_agents_are_scored_and_none_runs_again(bench):
    recorded = await bench.roll_out("calc", QUESTION, [r"\boxed{4}"])
    tree = {"nodes": bare(tree_of("r").nodes), "work": WORK}
    divided = recorded.model_copy(update={"rollout": recorded.rollout.model_copy(update=tree)})
    result = await bench.rescore(divided, environment="divided")
    assert (result.reward, result.reward_parts) == (WORK.critical_steps, {"nodes": 2.0})
    refused = await bench.rescore(divided, environment="divided", replay="always")
    assert (refused.reward, refused.error.code) == (None, "not_replayable")
    assert "sub-agents" in refused.error.message
    assert refused.error.hint


async def test_a_record_without_its_sub_agents_tells_by_its_calls_that_there_were_some(bench):
    script = [turn("", call("assign_task", agent="a", prompt="2 + 2")), r"\boxed{4}"]
    recorded = await bench.roll_out("calc", QUESTION, script)
    assert (recorded.rollout.nodes, recorded.rollout.work) == ([], None)
    assert (await bench.rescore(recorded)).reward == 1.0
    refused = await bench.rescore(recorded, replay="always")
    assert refused.error.code == "not_replayable"
    idle = recorded.rollout.model_copy(update={"work": WORK.model_copy(update={"assigns": Assigns(refused=1)})})
    replayed = await bench.rescore(recorded.model_copy(update={"rollout": idle}), replay="always")
    assert (replayed.reward, replayed.replayed) == (1.0, True)

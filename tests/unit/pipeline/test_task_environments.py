"""Every way to roll out or score a task uses the environment that `for_instance` returns for it."""

from pathlib import Path

import pytest

from api_schemas.rollouts import StopReason
from rollout_service.authoring.attacks import attack_environment
from rollout_service.authoring.audit import audit_environment
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.cli.env.solutions import try_tasks
from rollout_service.environments.contract import Environment, EnvironmentSpec
from rollout_service.episodes import Episode, EpisodeLimits, Score
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy
from sandboxes import LocalConfig, make_provider


class ByInstance(Environment):
    """An environment whose limit on turns is in the instance; the score is the limit that was used."""

    def __init__(self, max_turns: int = 1) -> None:
        self.spec = EnvironmentSpec(name="by-instance", limits=EpisodeLimits(max_turns=max_turns))

    def for_instance(self, instance):
        return ByInstance(instance["turns"])

    async def run(self, episode: Episode) -> StopReason:
        return StopReason.FINISHED

    async def evaluate(self, episode: Episode) -> Score:
        return Score(float(self.spec.limits.max_turns), {"limits": float(episode.limits.max_turns)})


@pytest.fixture
async def sandboxes(tmp_path: Path):
    provider = make_provider(LocalConfig(provider="local"), tmp_path)
    yield SandboxSource(provider)
    await provider.close()


async def test_a_trial_uses_the_environment_of_its_instance(sandboxes):
    played = await play(ByInstance(), {"turns": 7}, ScriptedPolicy(["done"]), sandboxes)
    assert played.score == Score(7.0, {"limits": 7.0})


async def test_attacks_use_the_environment_of_their_instance(sandboxes):
    report = await attack_environment(ByInstance(), sandboxes, instance={"turns": 5}, attacks=[])
    assert report.idle_reward == 5.0


class Broken(ByInstance):
    """An environment with a bug in its grading."""

    def for_instance(self, instance):
        return self

    async def evaluate(self, episode: Episode) -> Score:
        raise NameError("no such name")


async def test_each_check_says_where_the_code_of_an_environment_failed(sandboxes):
    place = f"at {__name__}, line "
    [tried] = await try_tasks(Broken(), [{}], sandboxes, at_once=1)
    assert place in tried.problems[-1]
    report = await audit_environment(Broken(), sandboxes, [(0, {})], runs=1)
    assert place in report.findings[0]
    with pytest.raises(EnvironmentFailedError, match=place):
        await attack_environment(Broken(), sandboxes, instance={}, attacks=[])

"""Slots are shared fairly, and leases asked for only where an environment can run."""

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts import StopReason
from rollout_service.authoring.attacks import attack_environment
from rollout_service.authoring.audit import audit_environment
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.cli.env.solutions import try_tasks
from rollout_service.environments.contract import Environment, EnvironmentSpec
from rollout_service.episodes import Episode, EpisodeLimits, Score
from rollout_service.pipeline.fair_slots import FairSlots
from rollout_service.pipeline.settlement import ClaimRules
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy


async def test_an_episode_that_waits_for_many_gets_no_more_than_one_that_waits_for_few():
    slots, order = FairSlots(1), []

    async def work(episode):
        async with slots.slot(episode):
            order.append(episode)
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        for episode in ["wide"] * 6 + ["narrow"] * 2:
            tasks.start_soon(work, episode)
    assert order[:5] == ["wide", "wide", "narrow", "wide", "narrow"]
    assert (slots.held, slots.waiting) == (0, 0)


async def test_a_slot_that_is_lent_lets_others_work_and_comes_back():
    slots, events = FairSlots(1), []

    async def child():
        async with slots.slot("e"):
            events.append("child")

    async with slots.slot("e") as held:
        async with held.lent(), anyio.create_task_group() as tasks:
            tasks.start_soon(child)
        events.append("parent")
        assert slots.held == 1
    assert events == ["child", "parent"]
    assert slots.held == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=30), st.integers(1, 4))
def test_no_slot_is_lost_whoever_gives_up(workers, total):
    async def main():
        slots, most = FairSlots(total), 0

        async def work(episode, patience, lends):
            nonlocal most
            scope = anyio.CancelScope()

            async def impatient():
                for _ in range(patience):
                    await checkpoint()
                scope.cancel()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(impatient)
                with scope:
                    async with slots.slot(f"episode {episode}") as held:
                        most = max(most, slots.held)
                        await checkpoint()
                        if lends:
                            async with held.lent():
                                await checkpoint()
                        await checkpoint()

        async with anyio.create_task_group() as tasks:
            for worker in workers:
                tasks.start_soon(work, *worker)
        assert (slots.held, slots.waiting) == (0, 0)
        assert most <= total

    anyio.run(main)


NAMES = ["calc", "math", "pointers", "split"]
POOLS = st.sampled_from(["frozen", "frozen-1", "frozen-2"])


@given(
    left=st.dictionaries(st.sampled_from(NAMES), POOLS),
    cluster=st.none() | st.dictionaries(st.sampled_from(NAMES), st.floats(0, 10)),
    changes=st.lists(st.frozensets(POOLS), min_size=1, max_size=4),
)
def test_an_environment_is_claimed_unless_its_sub_agents_are_not_served(left, cluster, changes):
    rules = ClaimRules(NAMES)
    rules.suit(cluster)
    for name, pool in left.items():
        rules.leave(name, pool)
    came_back: set[str] = set()
    for pools in changes:
        came_back |= pools
        waits = rules.waits(pools)
        for name in NAMES:
            is_let = cluster is None or name in cluster
            is_served = name not in left or left[name] in came_back
            is_claimed = waits is None or name in waits
            assert is_claimed is (is_let and is_served)
            if is_claimed and cluster is not None:
                assert waits[name] == cluster[name]


def test_everything_is_claimed_at_once_unless_something_waits_for_its_sub_agents():
    rules = ClaimRules(NAMES)
    assert rules.waits([]) is None, "also rollouts of an environment that is gone, which then fail"
    rules.leave("pointers", "frozen-1")
    assert rules.waits(["policy"]) == {"calc": 0.0, "math": 0.0, "split": 0.0}
    assert rules.waits(["policy", "frozen-1"]) is None


async def test_closed_rules_are_waited_for():
    rules = ClaimRules()
    rules.open(False)
    with anyio.move_on_after(0.05) as scope:
        await rules.until_open()
    assert scope.cancelled_caught
    rules.open(True)
    await rules.until_open()


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

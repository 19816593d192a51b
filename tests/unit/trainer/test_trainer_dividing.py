"""What the trainer asks of a run whose policy hands on work, and how it compares its arms."""

import importlib.util
import sys
from pathlib import Path

import pytest
from trainer.dividing import NEVER, Dividing, advantages_of, division_of

from api_schemas.runs import Advantages

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_parl.py"


@pytest.fixture(scope="module")
def arms():
    spec = importlib.util.spec_from_file_location("train_parl", EXAMPLE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_rewards_for_handing_on_work_nothing_is_asked():
    assert Dividing().order() is None


def test_annealed_weights_fall_to_nothing_and_constant_ones_stay():
    annealed, constant = Dividing("annealed", anneal=4).order(), Dividing("constant").order()
    assert (annealed.length, annealed.lambda1.end, annealed.lambda2.end) == (4, 0.0, 0.0)
    assert (constant.length, constant.lambda1.end, constant.lambda2.end) == (NEVER, 0.3, 0.2)


def test_advantages_keep_the_scale_of_the_weights():
    assert advantages_of("pointers") is Advantages.LEAVE_ONE_OUT
    assert advantages_of("calc") is Advantages.GROUP_NORM


def test_rollouts_without_sub_agents_have_no_division():
    assert division_of([]) == {}


def test_the_updates_to_a_reward_are_counted_to_the_last_of_three(arms):
    assert arms.updates_to([0.1, 0.7, 0.8, 0.8]) == 4
    assert arms.updates_to([0.9, 0.9]) is None
    assert arms.updates_to([0.2] * 9) is None


@pytest.mark.slow
def test_an_arm_without_a_good_reward_in_every_seed_has_no_median(arms):
    good = [{"reward": 0.8}] * 3
    trainings = [
        arms.Training("none", seed, {"final_reward": 0.5 + seed / 10}, points)
        for seed, points in enumerate([good, good[:1]])
    ]
    found = arms.summary(trainings)
    assert found["updates_to_075"] is None
    assert found["updates_to_075_of_seeds"] == [3, None]
    assert found["final_perf"] == pytest.approx(0.55)
    assert found["start_perf"] is None


def test_the_curve_of_an_arm_goes_as_far_as_all_of_its_seeds(arms):
    trainings = [
        arms.Training(
            "none", seed, {}, [{"step": step, "reward": float(seed)} for step in range(1, 3 + seed)]
        )
        for seed in range(2)
    ]
    assert arms.mean_curve(trainings) == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5}]

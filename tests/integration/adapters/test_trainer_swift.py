"""ms-swift's own GRPO trainer trains on the service's rollouts over the adapter's routes."""

import pytest

from tests.support.adapters.real_trainers import figures_of

pytestmark = [pytest.mark.trainers, pytest.mark.slow(seconds=120)]


def test_swift_trains_a_step_and_evaluates_the_new_weights(tmp_path):
    figures = figures_of("swift_grpo.py", tmp_path, overlay="swift")
    rewards = [[reward for reward in group if reward is not None] for group in figures["rewards"]]
    assert sorted(len(group) for group in figures["rewards"]) == [4, 5]  # a failed one was run again
    assert figures["samples"] == 9  # one of the rollouts has two segments
    assert (figures["wrong_advantages"], figures["wrong_tokens"]) == (0, 0)
    assert figures["logprob_gap"] < 1e-4
    assert figures["reward"] == pytest.approx(sum(map(sum, rewards)) / 8)
    assert figures["modes"] == ["train", "eval"]
    assert figures["eval_reward"] == pytest.approx(sum(figures["evaluated"]) / 8)
    assert figures["versions"] == [-1, figures["weight_version"]]
    assert "503" in figures["refused"]
    assert "stage_timeout" in figures["refused"]

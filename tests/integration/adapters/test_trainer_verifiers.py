"""verifiers' own server, client and evaluation carry the service's rollouts without loss."""

import pytest

from tests.support.adapters.real_trainers import figures_of

pytestmark = [pytest.mark.trainers, pytest.mark.slow(seconds=60)]


def test_verifiers_gets_an_episode_for_each_rollout(tmp_path):
    figures = figures_of("verifiers_episodes.py", tmp_path)
    assert figures["ok"] == [4, 4, 3, 4]
    assert figures["failed"] == [[0, ["stage_timeout"]]]
    assert figures["samples"] == 16  # of 15 rollouts, of which one has two segments
    assert (figures["wrong_tokens"], figures["wrong_advantages"]) == (0, 0)
    assert all(figures["usage"])
    assert figures["logprob_gap"] < 1e-4
    assert (figures["gradient"] > 0) is figures["differs"]
    evaluation = figures["evaluation"]
    assert evaluation["ok"] == [True, False]
    assert evaluation["errors"] == ["InvalidRequestError"]
    assert evaluation["mean"] == f"{evaluation['expected'][0]:.2f}"  # a zero for the failed one would be in brackets

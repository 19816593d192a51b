"""The Tinker cookbook's own code makes the right advantages, data and metrics of the service's rollouts."""

import pytest

from tests.support.adapters.real_trainers import figures_of

pytestmark = [pytest.mark.trainers, pytest.mark.slow(seconds=60)]


def test_the_cookbook_trains_on_the_services_groups(tmp_path):
    figures = figures_of("tinker_groups.py", tmp_path)
    assert figures["groups"] == [True, True, False, True]
    assert (figures["rollouts"], figures["datums"]) == (12, 13)  # one has two segments
    assert (figures["wrong_advantages"], figures["wrong_tokens"]) == (0, 0)
    assert figures["logprob_gap"] < 1e-4
    assert (figures["gradient"] > 0) is figures["differs"]
    assert figures["errors"] == {
        "rollout_errors/NoRewardError": 1.0,  # of the group that was completed with another attempt
        "rollout_errors/total": 1.0,
        "rollout_errors/groups_skipped": 1.0,
    }
    (warning,) = figures["warnings"]
    assert "stage_timeout" in warning
    evaluation = figures["evaluation"]
    assert evaluation["reward"] == evaluation["expected"]  # a zero for the failed one would halve it
    assert (evaluation["episodes"], evaluation["skipped"], evaluation["errors"]) == (1, 1.0, 1)

"""NeMo Gym's own servers and clients carry the service's rollouts to NeMo-RL without loss."""

import pytest

from tests.support.adapters.real_trainers import figures_of
from tests.support.newer_python import needs_python_313

pytestmark = [
    pytest.mark.apptainer,
    pytest.mark.trainers,
    pytest.mark.slow(seconds=90),
    needs_python_313,
]


@pytest.mark.parametrize(("version", "overlay"), [("0.4.0", "nemo-gym/0.4"), ("0.7.0", None)])
def test_nemo_gym_collects_groups_that_nemo_rl_can_train_on(tmp_path, version, overlay):
    figures = figures_of("nemo_gym_groups.py", tmp_path, environment="nemo-gym", overlay=overlay, sandbox="apptainer")
    assert figures["version"] == version
    assert figures["groups"] == [4, 4]
    assert (figures["wrong_tokens"], figures["wrong_advantages"]) == (0, 0)
    assert figures["left_out"] > 0  # one has two segments
    assert figures["wrong_calls"] == 0
    (failed,) = figures["failed"]
    assert failed["status"] == 500
    assert "NoRewardError" in failed["said"]
    assert "stage_timeout" in failed["said"]
    assert figures["refused"] == [422] * 3
    evaluation = figures["evaluation"]
    assert 0 < evaluation["mean"] == pytest.approx(evaluation["expected"])
    assert evaluation["answers"] == 10  # at a temperature of 0, each task has one

"""The successes required in a demo of the tuned policy allow for chance."""

import pytest

from rollout_service.cli.demo.run import required_successes


@pytest.mark.parametrize(("rollouts", "needed"), [(1, 1), (2, 1), (8, 6), (32, 27), (64, 56), (500, 449)])
def test_few_rollouts_may_err_by_chance_and_many_may_not(rollouts, needed):
    assert required_successes(rollouts) == needed

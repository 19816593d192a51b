"""The failures of a verifier, which leave a rollout without a reward.

EnvironmentFailedError
 |- HealthcheckFailedError     the sandbox did not become healthy
 |- TestsNeverRanError         the verifier could not run its tests
 |- VerifierTimeoutError       the verifier did not end in time
 |- RewardMissingError         it wrote neither reward.json nor reward.txt
 |- RewardEmptyError           the file has nothing in it
 `- RewardInvalidError         the file has something else than finite numbers
"""

from __future__ import annotations

from rollout_service.base.errors import EnvironmentFailedError


class HealthcheckFailedError(EnvironmentFailedError):
    """The sandbox of a task did not become healthy."""

    code = "healthcheck_failed"


class TestsNeverRanError(EnvironmentFailedError):
    """The verifier of a task could not run its tests, whatever reward it wrote."""

    __test__ = False  # pytest collects classes by their names
    code = "tests_never_ran"


class VerifierTimeoutError(EnvironmentFailedError):
    """The verifier of a task did not end in time."""

    code = "verifier_timeout"


class RewardMissingError(EnvironmentFailedError):
    """The verifier of a task wrote no reward."""

    code = "reward_missing"


class RewardEmptyError(EnvironmentFailedError):
    """The verifier of a task wrote a file with nothing in it."""

    code = "reward_empty"


class RewardInvalidError(EnvironmentFailedError):
    """The verifier of a task wrote something else than finite numbers."""

    code = "reward_invalid"

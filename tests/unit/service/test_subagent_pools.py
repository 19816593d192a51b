"""A task is refused if its sub-agents have no pool of their own, and a run if its pool is frozen."""

import pytest

from rollout_service.agents.parallel.settings import ParallelSettings, SubagentSettings
from rollout_service.base.errors import InvalidFieldError
from rollout_service.engines.errors import NoBackendError
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.serving.subagent_pools import (
    check_own_pool,
    check_subagent_pool,
    check_trained_pool,
    subagent_pool,
)
from rollout_service.environments.contract import EnvironmentSpec

ALONE = EnvironmentSpec(name="alone")
TOGETHER = EnvironmentSpec(name="together", parallel=ParallelSettings(subagent=SubagentSettings(pool="frozen-2")))


def fields_of(error: InvalidFieldError) -> list[str]:
    return [field.path for field in error.fields]


def test_an_environment_without_sub_agents_needs_no_second_pool():
    def nothing_is_served(pool: str) -> None:
        raise NoBackendError(f"there is no pool {pool!r}")

    check_subagent_pool(ALONE, nothing_is_served)
    check_own_pool(ALONE, "frozen-2")
    assert subagent_pool(ALONE) is None


def test_a_pool_of_sub_agents_that_nobody_serves_is_refused_with_the_way_to_register_one():
    with pytest.raises(InvalidFieldError, match="'frozen-2', which has no backend") as caught:
        check_subagent_pool(TOGETHER, Pools().__getitem__)
    assert fields_of(caught.value) == ["environment"]
    assert "POST /v1/backends" in caught.value.hint
    assert '"pool":"frozen-2"' in caught.value.hint
    check_subagent_pool(TOGETHER, lambda _: None)


def test_a_rollout_and_its_sub_agents_have_different_pools():
    with pytest.raises(InvalidFieldError, match="serves the sub-agents") as caught:
        check_own_pool(TOGETHER, "frozen-2")
    assert fields_of(caught.value) == ["body.pool"]
    check_own_pool(TOGETHER, "frozen-1")
    check_own_pool(TOGETHER, "policy")


@pytest.mark.parametrize("pool", ["frozen", "frozen-1"])
def test_no_run_trains_a_frozen_pool(pool):
    with pytest.raises(InvalidFieldError, match="a run trains its pool") as caught:
        check_trained_pool(pool)
    assert fields_of(caught.value) == ["body.pool"]
    check_trained_pool("policy")

"""The pools of sub-agents: whether a task's may be used, and which environments have theirs in service.

A rollout is accepted only if its sub-agents have a pool of their own that is served, or about to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from api_schemas.inference import FROZEN_NAMES, is_frozen
from rollout_service.base.errors import InvalidFieldError
from rollout_service.engines.errors import NoBackendError
from rollout_service.environments.contract import Environment, EnvironmentSpec


def subagent_pool(spec: EnvironmentSpec) -> str | None:
    """Return None if the environment's agent has no sub-agents."""
    return None if spec.parallel is None else spec.parallel.subagent.pool


def subagent_pools(environments: Iterable[Environment]) -> dict[str, str | None]:
    return {one.spec.name: subagent_pool(one.spec) for one in environments}


def check_subagent_pool(spec: EnvironmentSpec, check_pool: Callable[[str], None]) -> None:
    """Check that the pool of an environment's sub-agents is served, or about to be, as `PolicyServing.check` does.

    Raises:
        InvalidFieldError: It is not; the error's field is `environment`.
    """
    if (pool := subagent_pool(spec)) is None:
        return
    try:
        check_pool(pool)
    except NoBackendError as error:
        problem = f"its sub-agents need pool {pool!r}, which has no backend"
        raise InvalidFieldError.at("environment", problem, hint=error.hint, context={"pool": pool}) from error


def check_own_pool(spec: EnvironmentSpec, pool: str) -> None:
    """Check that a rollout's own pool is not that of its sub-agents.

    Raises:
        InvalidFieldError: It is; the error's field is `body.pool`.
    """
    if pool == subagent_pool(spec):
        problem = f"pool {pool!r} serves the sub-agents of environment {spec.name!r}"
        raise InvalidFieldError.at(
            "body.pool",
            problem,
            hint="Register the engine in a second pool, and name that one.",
        )


def check_trained_pool(pool: str) -> None:
    """Check that a run may train a pool.

    Raises:
        InvalidFieldError: The pool is frozen; the error's field is `body.pool`.
    """
    if is_frozen(pool):
        problem = f"pool {pool!r} is frozen, and a run trains its pool"
        raise InvalidFieldError.at(
            "body.pool",
            problem,
            hint=f"Name a pool whose name is not {FROZEN_NAMES}. To evaluate a frozen policy, submit single rollouts.",
        )

"""Episodes of scripted policies, for tests of agents and environments without the stages around them."""

from collections.abc import Iterable
from typing import Any

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Task
from rollout_service.environments.contract import Environment
from rollout_service.episodes import Episode, EpisodeLimits
from rollout_service.testing.scripted_policy import ScriptedPolicy, ScriptedTurn


def scripted_episode(script: Iterable[ScriptedTurn] = (), **fields: Any) -> Episode:
    """Return the first attempt at a task; `limits` may be a dictionary."""
    limits = fields.pop("limits", {})
    given = {
        "request": RolloutRequest(rollout_id="r", task=Task(environment="test")),
        "attempt": 1,
        "limits": EpisodeLimits(**limits) if isinstance(limits, dict) else limits,
    }
    return Episode(**{**given, "policy": fields.get("policy") or ScriptedPolicy(script), **fields})


def episode_of(
    environment: Environment, instance: dict[str, Any], script: Iterable[ScriptedTurn] = (), **fields: Any
) -> Episode:
    """Return the first attempt at a task of an environment, with its limits."""
    task = Task(environment=environment.spec.name, instance=instance)
    request = RolloutRequest(rollout_id="r", task=task)
    return scripted_episode(script, request=request, limits=environment.spec.limits, **fields)

"""Environments whose agent is another, such as the task's own solution, to check the grading."""

from __future__ import annotations

from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from rollout_service.environments.contract import Environment
from rollout_service.episodes import Episode, Score


class WrappedEnvironment(Environment):
    """Sets up and scores as another environment does; the subclass says what the agent does."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.spec = environment.spec
        self.shares_setup = environment.shares_setup

    def check(self, instance: dict[str, JsonValue]) -> None:
        self._environment.check(instance)

    async def prepare(self, episode: Episode) -> None:
        await self._environment.prepare(episode)

    async def init(self, episode: Episode) -> None:
        await self._environment.init(episode)

    async def execute(self, episode: Episode) -> None:
        await self._environment.execute(episode)

    async def evaluate_checkpoint(self, episode: Episode, number: int) -> bool:
        return await self._environment.evaluate_checkpoint(episode, number)

    async def evaluate(self, episode: Episode) -> Score:
        return await self._environment.evaluate(episode)


class Solving(WrappedEnvironment):
    def for_instance(self, instance: dict[str, JsonValue]) -> Environment:
        return Solving(self._environment.for_instance(instance))

    async def run(self, episode: Episode) -> StopReason:
        return await self._environment.solve(episode)

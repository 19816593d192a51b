"""What the environments `pointers` and `split` share: a sum as the answer, scored within a budget of steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

from pydantic import JsonValue

from rollout_service.agents.tool_calling.tools import Tool
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.builtin import lookups
from rollout_service.environments.contract import EnvironmentSpec, Replayable
from rollout_service.episodes import Episode, Score


class LookupEnvironment(AgentEnvironment):
    """Gives the agent and its sub-agents the tool `read`, and the agent `tools` besides."""

    replayable: Replayable = "never"  # the score depends on the steps, which an answer does not tell

    def __init__(
        self,
        spec: EnvironmentSpec,
        make: lookups.Make,
        sizes: Sequence[int],
        seed: int,
        *,
        tools: Sequence[Tool] = (),
    ) -> None:
        """`make` makes a task of a size; `seed` is that of the data set."""
        super().__init__(spec, extra_tools=[*tools, lookups.READ], subagent_tools=[lookups.READ])
        self._make = make
        self._sizes = sizes
        self._seed = seed

    @abstractmethod
    def expected(self, instance: dict[str, JsonValue]) -> int:
        """Return the right sum.

        Raises:
            InvalidFieldError: The instance cannot be used.
        """

    def check(self, instance: dict[str, JsonValue]) -> None:
        super().check(instance)
        self.expected(instance)

    async def evaluate(self, episode: Episode) -> Score:
        return lookups.score_sum(episode, self.expected(episode.instance))

    def dataset(self) -> list[dict[str, JsonValue]]:
        return self._dataset

    @cached_property
    def _dataset(self) -> list[dict[str, JsonValue]]:
        return lookups.instances(self._make, self._sizes, self._seed)

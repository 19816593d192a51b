"""`kind = "openenv"`: an environment that a server of OpenEnv runs, with a session of its own for each rollout.

Guarantees: rewards are the server's, added up; the session is closed however the rollout ends; no more sessions are
open at once than the environment.toml allows; a server that fails is a failure, never a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
from pydantic import BaseModel, ConfigDict, JsonValue, field_validator

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.agents.tool_calling.agent import ToolCallingAgent
from rollout_service.base.templates import PromptTemplate
from rollout_service.environments.bridges.openenv.acting import ActTool, OpenEnvActor
from rollout_service.environments.bridges.openenv.declaration import OpenEnvDeclaration
from rollout_service.environments.bridges.openenv.session import OpenEnvServer
from rollout_service.environments.bridges.turns import REWARDS, Earned, score_turns, take_turns
from rollout_service.environments.contract import Environment
from rollout_service.environments.dataset_files import find_empty, read_files
from rollout_service.environments.declarative.declaration import dataset_files, load_table
from rollout_service.environments.instance_fields import read_instance
from rollout_service.episodes import Episode, Score


class ResetArguments(BaseModel):
    """The fields of an instance."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    seed: int | None = None
    options: dict[str, JsonValue] = {}
    """More arguments of the environment's `reset`."""

    @field_validator("options")
    @classmethod
    def _has_no_seed(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if "seed" in options:
            raise ValueError("the seed has a field of its own, next to `options`")
        return options

    def for_reset(self) -> dict[str, JsonValue]:
        """Return what the server is sent."""
        return self.options if self.seed is None else {"seed": self.seed, **self.options}


class OpenEnv(Environment):
    """Instances: arguments of a reset."""

    def __init__(
        self,
        declaration: OpenEnvDeclaration,
        dataset: Sequence[dict[str, JsonValue]] = (),
        findings: Sequence[str] = (),
    ) -> None:
        """Create it from its settings, the instances that ship with them, and findings about these.

        Raises:
            ConfigurationError: A prompt is not a valid template.
        """
        self.spec = declaration.spec()
        self.replayable = declaration.replayable
        self._declaration = declaration
        self._dataset = dataset
        self._findings = findings
        self._server = OpenEnvServer(declaration.url, declaration.headers)
        self._sessions = anyio.CapacityLimiter(declaration.sessions)
        where = f"of {declaration.name!r}"
        self._system = PromptTemplate(declaration.system or "", where=f"the system prompt {where}")
        self._prompt = PromptTemplate(declaration.prompt, where=f"the prompt {where}")

    def check(self, instance: dict[str, JsonValue]) -> None:
        read_instance(ResetArguments, instance)
        self._messages(instance, "")

    async def run(self, episode: Episode) -> StopReason:
        """Open a session, and let the policy act in it. Nothing is open before, so nothing has to be closed later."""
        arguments = read_instance(ResetArguments, episode.instance).for_reset()
        async with self._sessions, self._server.session() as session:
            actor = OpenEnvActor(
                session,
                episode.limits,
                text_field=self._declaration.text_field,
                observation_field=self._declaration.observation_field,
            )
            messages = self._messages(episode.instance, await actor.reset(arguments))
            if self._declaration.text_field is not None:
                return await take_turns(episode, messages, actor)
            return await self._call_tool(episode, messages, actor)

    async def _call_tool(self, episode: Episode, messages: list[Message], actor: OpenEnvActor) -> StopReason:
        earned = episode.state[REWARDS] = Earned()
        schema = await self._server.action_schema()
        agent = ToolCallingAgent([ActTool(self._declaration.tool, schema, actor, earned)])
        episode.policy.offer(agent.definitions)
        return await agent.run(episode, messages)

    def _messages(self, instance: dict[str, JsonValue], first: str) -> list[Message]:
        system = self._system.render(instance)
        prompt = "\n\n".join(text for text in (self._prompt.render(instance), first) if text)
        begin = [Message(role="system", content=system)] if system else []
        return [*begin, Message(role="user", content=prompt)]

    async def evaluate(self, episode: Episode) -> Score:
        return score_turns(episode)

    def findings(self) -> list[str]:
        return list(self._findings)

    def dataset(self) -> list[dict[str, JsonValue]]:
        return [dict(instance) for instance in self._dataset]


def load_openenv(folder: Path) -> OpenEnv:
    """Load the environment in a folder whose `environment.toml` has `kind = "openenv"`.

    Raises:
        ConfigurationError: The environment is not valid; the message says why.
    """
    declaration = load_table(OpenEnvDeclaration, folder)
    files = dataset_files(declaration.dataset, folder)
    return OpenEnv(declaration, read_files(files), find_empty(files))

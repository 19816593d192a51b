"""`kind = "openenv"`: an environment that a server of OpenEnv runs, with a session of its own for each rollout.

Guarantees: rewards are the server's, added up; the session is closed however the rollout ends; no more sessions are
open at once than the environment.toml allows; a server that fails is a failure, never a reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import orjson
from pydantic import Field, JsonValue, ValidationInfo, field_validator

from api_schemas.base import Name
from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.agents.tool_calling.agent import ToolCallingAgent
from rollout_service.agents.tool_calling.tools import ToolContext, ToolResult, cut_middle
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.base.templates import PromptTemplate
from rollout_service.environments.bridges.openenv_session import (
    InvalidActionError,
    Observed,
    OpenEnvServer,
    OpenEnvSession,
)
from rollout_service.environments.bridges.turns import REWARDS, Consequence, Earned, score_turns, take_turns
from rollout_service.environments.contract import Environment, EnvironmentSettings
from rollout_service.environments.dataset_files import InstanceFields, ShippedTasks, read_instance
from rollout_service.environments.declarative.declaration import (
    DatasetTable,
    dataset_files,
    load_table,
    spec_from,
)
from rollout_service.episodes import Episode, EpisodeLimits, Score
from rollout_service.tokens import tool_spec


class ResetArguments(InstanceFields):
    seed: int | None = None
    options: dict[str, JsonValue] = {}

    @field_validator("options")
    @classmethod
    def _has_no_seed(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if "seed" in options:
            raise ValueError("the seed has a field of its own, next to `options`")
        return options

    def for_reset(self) -> dict[str, JsonValue]:
        return self.options if self.seed is None else {"seed": self.seed, **self.options}


class OpenEnv(Environment):
    def __init__(self, declaration: OpenEnvDeclaration, shipped: ShippedTasks = ShippedTasks()) -> None:  # noqa: B008
        self.spec = spec_from(declaration)
        self.replayable = declaration.replayable
        self._declaration = declaration
        self.shipped = shipped
        self._server = OpenEnvServer(declaration.url, declaration.headers)
        self._sessions = anyio.CapacityLimiter(declaration.sessions)
        where = f"of {declaration.name!r}"
        self._system = PromptTemplate(declaration.system or "", where=f"the system prompt {where}")
        self._prompt = PromptTemplate(declaration.prompt, where=f"the prompt {where}")

    def check(self, instance: dict[str, JsonValue]) -> None:
        read_instance(ResetArguments, instance)
        self._messages(instance, "")

    async def run(self, episode: Episode) -> StopReason:
        """No session is open before, so none has to be closed later."""
        arguments = read_instance(ResetArguments, episode.instance).for_reset()
        async with self._sessions, self._server.session() as session:
            actor = OpenEnvActor(session, episode.limits, self._declaration)
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


def load_openenv(folder: Path) -> OpenEnv:
    declaration = load_table(OpenEnvDeclaration, folder)
    return OpenEnv(declaration, ShippedTasks.read(dataset_files(declaration.dataset, folder)))


# The address is the operator's: nothing in a task's instance can lead to another one.


class OpenEnvDeclaration(EnvironmentSettings):
    kind: Literal["openenv"] = "openenv"
    name: Name
    description: str = "An environment that a server of OpenEnv runs."
    url: str = Field(pattern=r"^https?://[^/@?#\s]+(/[^?#\s]*)?$")
    """The server's address, to which `/ws` and `/schema` are added."""
    headers: dict[str, str] = {}
    """Headers of every request, such as a token's."""
    sessions: int = Field(1, ge=1)
    """How many rollouts have a session at once; others wait. Servers allow one unless they are started with more."""
    text_field: str | None = Field(None, min_length=1)
    """The field of an action that the policy's whole text fills; left out, the policy acts by calls of `tool`."""
    tool: str = Field("act", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """The name of the tool whose arguments are an action."""
    observation_field: str | None = Field(None, min_length=1)
    """The field of an observation that the policy sees; left out, all of it."""
    system: str | None = None
    prompt: str = ""
    """Stands before the first observation."""
    replayable: Literal["tools", "never"] = "never"
    """`tools`: the same reset and actions always bring the same observations, so an interrupted rollout can resume."""
    limits: EpisodeLimits = EpisodeLimits(max_turns=64, max_tokens=32_768, max_turn_tokens=2_048)
    dataset: DatasetTable | None = None

    @field_validator("tool")
    @classmethod
    def _is_the_only_way_to_act(cls, tool: str, info: ValidationInfo) -> str:
        if info.data.get("text_field") is not None:
            raise ValueError("give either `text_field` or `tool`")
        return tool


# An action that the server refuses is explained to the policy; an episode that ends without any reward is a failure,
# never a zero.

METADATA: Final = "metadata"
"""A field of actions and observations that is for programs."""
SCHEMA_BYTES: Final = 64 * 1024
DESCRIPTION_CHARS: Final = 4_096


class OpenEnvActor:
    """Its methods raise EnvironmentFailedError if the environment failed, or ended early or without a reward."""

    def __init__(self, session: OpenEnvSession, limits: EpisodeLimits, declaration: OpenEnvDeclaration) -> None:
        self._session = session
        self._limits = limits
        self._text_field = declaration.text_field
        self._observation_field = declaration.observation_field
        self._invalid = 0
        self._has_reward = False

    async def reset(self, arguments: Mapping[str, Any]) -> str:
        observed = await self._session.reset(arguments, self._limits.init_seconds)
        if observed.done:
            raise EnvironmentFailedError(
                "the episode was over at its reset, so the policy cannot act",
                hint="Look at the arguments of the reset, which are the instance's.",
            )
        return self._text(observed)

    async def step(self, action: str) -> Consequence:
        return await self.act({self._text_field or "": action})

    async def act(self, action: Mapping[str, Any]) -> Consequence:
        try:
            observed = await self._session.step(action, self._limits.tool_seconds)
        except InvalidActionError as error:
            self._invalid += 1
            text = f"This action is not valid, and nothing was done: {error}"
            return Consequence(text=self._cut(text), parts={"invalid_actions": float(self._invalid)})
        self._has_reward |= observed.reward is not None
        if observed.done and not self._has_reward:
            raise EnvironmentFailedError(
                "the episode ended and no observation had a reward",
                hint="The environment must set `reward` of its observations; 0 is a reward too.",
            )
        return Consequence(text=self._text(observed), reward=observed.reward or 0.0, done=observed.done)

    def _text(self, observed: Observed) -> str:
        fields = {name: value for name, value in observed.observation.items() if name != METADATA}
        if self._observation_field is not None:
            if self._observation_field not in fields:
                raise EnvironmentFailedError(
                    f"an observation has no field {self._observation_field!r}",
                    hint=f"It has {', '.join(fields) or 'none'}; see `observation_field` in the environment.toml.",
                )
            value = fields[self._observation_field]
            return self._cut(value if isinstance(value, str) else orjson.dumps(value).decode())
        return self._cut(orjson.dumps(fields).decode())

    def _cut(self, text: str) -> str:
        return cut_middle(text, self._limits.tool_output_chars)


class ActTool:
    """Its arguments are an action. Implements `tool_calling.tools.Tool`."""

    parallel = False

    def __init__(self, name: str, schema: dict[str, Any], actor: OpenEnvActor, earned: Earned) -> None:
        self.name = name
        description = str(schema.get("description") or "Act in the environment.")[:DESCRIPTION_CHARS]
        self.definition = tool_spec(name, description, _parameters(schema))
        self._actor = actor
        self._earned = earned

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:  # noqa: ARG002
        result = await self._actor.act(arguments)
        self._earned.add(result)
        return ToolResult(result.text, answer=result.text if result.done else None)


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or len(orjson.dumps(schema)) > SCHEMA_BYTES:
        raise EnvironmentFailedError(
            f"the server's schema of an action is not that of an object, or has more than {SCHEMA_BYTES} bytes",
            hint="Set `text_field` in the environment.toml, so that the policy acts by text.",
        )
    kept = {key: schema[key] for key in ("required", "$defs") if key in schema}
    own = {name: value for name, value in properties.items() if name != METADATA}
    return {"type": "object", "properties": own, **kept}

"""How a policy acts in an environment of OpenEnv, and what it sees of it.

Guarantees: an action that the server refuses is explained to the policy; an episode that ends without any reward is a
failure, never a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from rollout_service.agents.tool_calling.text import cut_middle
from rollout_service.agents.tool_calling.tools import ToolContext, ToolResult
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.environments.bridges.openenv.session import InvalidActionError, Observed, OpenEnvSession
from rollout_service.environments.bridges.turns import Consequence, Earned
from rollout_service.episodes import EpisodeLimits
from rollout_service.tokens import ToolSpec

METADATA: Final = "metadata"
"""The field of every action and observation that is for programs."""
SCHEMA_BYTES: Final = 64 * 1024
DESCRIPTION_CHARS: Final = 4_096


class OpenEnvActor:
    """The other side of an episode: takes actions to the server."""

    def __init__(
        self,
        session: OpenEnvSession,
        limits: EpisodeLimits,
        *,
        text_field: str | None,
        observation_field: str | None,
    ) -> None:
        self._session = session
        self._limits = limits
        self._text_field = text_field
        self._observation_field = observation_field
        self._invalid = 0
        self._has_reward = False

    async def reset(self, arguments: Mapping[str, Any]) -> str:
        """Begin the episode, and return what the policy sees first.

        Raises:
            EnvironmentFailedError: The environment failed, or the episode is over before it began.
        """
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
        """Play an action as the server's schema has it.

        Raises:
            EnvironmentFailedError: The environment failed, or ended without a reward.
            OpenEnvServerError: The server was lost.
        """
        try:
            observed = await self._session.step(action, self._limits.tool_seconds)
        except InvalidActionError as error:
            self._invalid += 1
            text = f"This action is not valid, and nothing was done: {error}"
            return Consequence(self._cut(text), parts={"invalid_actions": float(self._invalid)})
        self._has_reward |= observed.reward is not None
        if observed.done and not self._has_reward:
            raise EnvironmentFailedError(
                "the episode ended and no observation had a reward",
                hint="The environment must set `reward` of its observations; 0 is a reward too.",
            )
        return Consequence(self._text(observed), observed.reward or 0.0, done=observed.done)

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
    """The tool whose arguments are an action; implements `tool_calling.tools.Tool`."""

    parallel = False

    def __init__(self, name: str, schema: dict[str, Any], actor: OpenEnvActor, earned: Earned) -> None:
        """`schema` is that of an action.

        Raises:
            EnvironmentFailedError: It is not one of an object, or too large for a prompt.
        """
        self.name = name
        self.definition: ToolSpec = {
            "type": "function",
            "function": {
                "name": name,
                "description": str(schema.get("description") or "Act in the environment.")[
                    :DESCRIPTION_CHARS
                ],
                "parameters": _parameters(schema),
            },
        }
        self._actor = actor
        self._earned = earned

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:  # noqa: ARG002
        """Act, and end the agent with the episode."""
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

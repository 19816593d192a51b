"""`nemo-gym`: rows of NeMo Gym, whose tools are answered and whose rewards are given by its own resources servers.

Guarantees: the reward is the server's own for the same conversation; each rollout has a process of the server in the
agent's sandbox, without a network. A failed verification fails the rollout.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, field_validator

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.agents.tool_calling.agent import ToolCallingAgent
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError, did_you_mean
from rollout_service.environments.bridges.nemo_gym.library import NAME, NEMO_GYM, TASKS, binds, servers
from rollout_service.environments.bridges.nemo_gym.server import Beginning, GymServer, GymTool, open_server
from rollout_service.environments.bridges.turns import score_turns, take_turns
from rollout_service.environments.contract import Environment, EnvironmentSpec, SandboxSettings
from rollout_service.environments.dataset_files import InstanceFields, read_instance
from rollout_service.environments.libraries import Library
from rollout_service.episodes import Episode, EpisodeLimits, Score
from rollout_service.tokens import ToolSpec, tool_spec

SCORE: Final = "nemo_gym_score"
SPEC = EnvironmentSpec(
    name=NAME,
    description="Rows of NeMo Gym with its own resources servers; `env install nemo-gym` installs it.",
    image="base",
    limits=EpisodeLimits(max_turns=32, max_tokens=32_768, max_turn_tokens=8_192),
    sandbox=SandboxSettings(memory="2G", max_processes=64),
)


class NemoGym(Environment):
    def __init__(self, library: Library = NEMO_GYM) -> None:
        self._library = library
        self.spec = SPEC.model_copy(update={"binds": binds(library)})

    def check(self, instance: dict[str, JsonValue]) -> None:
        known = servers(self._library)
        name = read_instance(GymTask, instance).server
        if name not in known:
            message = f"NeMo Gym has no resources server {name!r}{did_you_mean(name, known)}"
            raise InvalidFieldError.at("instance.server", message)

    async def run(self, episode: Episode) -> StopReason:
        task = read_instance(GymTask, episode.instance)
        row = cast(dict[str, JsonValue], episode.instance["row"])
        async with open_server(episode.require_sandbox(), row) as server:
            beginning = await server.begin(task.server, task.config)
            messages = task.messages()
            if beginning.has_turns:
                return await _take_turns(episode, task, messages, server, beginning)
            agent = ToolCallingAgent(_tools(task, server, beginning))
            episode.policy.offer(agent.definitions)
            stop_reason = await agent.run(episode, messages)
            # Now, and not in `evaluate`: what the tools have changed ends with the server.
            said, usage = episode.policy.messages[len(messages) :], episode.policy.usage
            episode.state[SCORE] = await server.verify(said, usage, stop_reason)
            return stop_reason

    async def evaluate(self, episode: Episode) -> Score:
        score = episode.state.get(SCORE)
        if not isinstance(score, Score):
            raise EnvironmentFailedError(f"{NAME} has not verified this rollout")
        return score

    def dataset(self) -> list[dict[str, JsonValue]]:
        return self._library.instances(TASKS)


async def _take_turns(
    episode: Episode, task: GymTask, messages: list[Message], server: GymServer, beginning: Beginning
) -> StopReason:
    if task.tools():
        raise EnvironmentFailedError(
            f"the server {task.server!r} answers in turns, and the row has tools",
            hint="Rows with tools need a server with /verify.",
        )
    first = [Message(role="user", content=beginning.observation)] if beginning.observation else []
    stop_reason = await take_turns(episode, [*messages, *first], server)
    episode.state[SCORE] = score_turns(episode)
    return stop_reason


def _tools(task: GymTask, server: GymServer, beginning: Beginning) -> list[GymTool]:
    definitions = task.tools()
    names = [str(definition["function"]["name"]) for definition in definitions]
    missing = [name for name in names if name not in beginning.tools]
    if missing and len(missing) < len(names):
        raise EnvironmentFailedError(
            f"the server {task.server!r} does not answer the tool {missing[0]!r} of the row",
            hint=f"It answers {', '.join(sorted(beginning.tools))}.",
        )
    return [GymTool(server, definition, is_answered=not missing) for definition in definitions]


environment = NemoGym()


# A row that cannot be rolled out is refused with the path of the field.

RESERVED: Final = frozenset({"seed_session", "verify", "aggregate_metrics", "reset", "step", "mcp", "stats"})
"""Routes with which a server resets or scores are never tools."""


class _InputPart(BaseModel):
    type: Literal["input_text", "text"]
    text: str


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


def _as_messages(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class _InputMessage(BaseModel):
    """A message with which the conversation begins; an assistant's own would not be the policy's."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user"]
    content: Annotated[list[_InputPart], BeforeValidator(_as_parts)]


class _Function(BaseModel):
    type: Literal["function"]
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None

    @field_validator("name")
    @classmethod
    def _is_a_tool(cls, name: str) -> str:
        if name in RESERVED:
            raise ValueError(f"{name!r} is a route of the server itself, not a tool")
        return name


class _Parameters(BaseModel):
    """Sampling parameters are ignored, since the run sets them."""

    input: Annotated[list[_InputMessage], BeforeValidator(_as_messages), Field(min_length=1)]
    instructions: str | None = None
    tools: list[_Function] | None = None

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, tools: list[_Function] | None) -> list[_Function] | None:
        names = [tool.name for tool in tools or []]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two tools are named {double!r}")
        return tools


class _GymRow(BaseModel):
    """The parts that are looked at here; the server gets all of the row."""

    responses_create_params: _Parameters


class GymTask(InstanceFields):
    server: str = Field(pattern=r"^[a-z0-9_]+$")
    row: _GymRow
    config: dict[str, JsonValue] = {}
    """Replaces the server's own settings."""

    def messages(self) -> list[Message]:
        parameters = self.row.responses_create_params
        first = [Message(role="system", content=parameters.instructions)] if parameters.instructions else []
        given = [Message(role=one.role, content="".join(part.text for part in one.content)) for one in parameters.input]
        return [*first, *given]

    def tools(self) -> list[ToolSpec]:
        return [
            tool_spec(tool.name, tool.description, tool.parameters)
            for tool in self.row.responses_create_params.tools or []
        ]

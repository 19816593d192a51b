"""A row of NeMo Gym as an instance, and what the policy gets of it.

Guarantees: a row that cannot be rolled out is refused with the path of the field; a tool is never a route with which a
server resets or scores.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, field_validator

from api_schemas.trajectories import Message
from rollout_service.tokens import ToolSpec

RESERVED: Final = frozenset({"seed_session", "verify", "aggregate_metrics", "reset", "step", "mcp", "stats"})
"""Routes of a server's own, which are not tools."""


class _InputPart(BaseModel):
    """A part of a message."""

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
    """A function tool."""

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
    """The beginning of a conversation; what a row says of sampling is the run's affair and is left aside."""

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
    """The parts of a row that are looked at here; all of it goes to the server."""

    responses_create_params: _Parameters


class GymTask(BaseModel):
    """The fields of an instance."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    server: str = Field(pattern=r"^[a-z0-9_]+$")
    """The folder of a resources server of NeMo Gym."""
    row: _GymRow
    config: dict[str, JsonValue] = {}
    """Settings of the server, in place of those in its own file."""

    def messages(self) -> list[Message]:
        """Return the messages with which the conversation begins."""
        parameters = self.row.responses_create_params
        first = [Message(role="system", content=parameters.instructions)] if parameters.instructions else []
        given = [
            Message(role=one.role, content="".join(part.text for part in one.content))
            for one in parameters.input
        ]
        return [*first, *given]

    def tools(self) -> list[ToolSpec]:
        """Return the row's tools in the form that chat formats take."""
        return [_definition(tool) for tool in self.row.responses_create_params.tools or []]


def _definition(tool: _Function) -> ToolSpec:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.parameters or {"type": "object", "properties": {}},
        },
    }

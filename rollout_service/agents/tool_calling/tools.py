"""What a tool is, and how one is made from a coroutine.

A call that the policy got wrong raises ToolInputError, whose message the policy reads. Whatever else a tool
raises is a failure of the infrastructure and ends the rollout as one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_service.agents.errors import ToolInputError
from rollout_service.tokens import ToolSpec
from sandboxes import LimitExceededError, Sandbox


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a call may use."""

    sandbox: Sandbox | None
    """The agent's sandbox; None in an environment without one."""
    seconds: float
    """Wall clock that the call has."""
    output_chars: int
    """Length of the longest result that is useful; at least 256."""
    limit_violations: list[LimitExceededError] = field(default_factory=list)
    """Takes the limits of the sandbox that the call reached."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave."""

    text: str
    answer: str | None = None
    """Set by a tool that ends the agent: its final answer."""


class Tool(Protocol):
    """Something that the policy can call."""

    @property
    def name(self) -> str:
        """What the policy calls it by."""
        ...

    @property
    def definition(self) -> ToolSpec:
        """What the policy is told of it, in the OpenAI function format."""
        ...

    @property
    def parallel(self) -> bool:
        """Whether calls that follow each other in one turn may run at the same time: nothing is changed."""
        ...

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """Carry out a call; raises ToolInputError for one that cannot be carried out as written."""
        ...


class Arguments(BaseModel):
    """Base of a tool's arguments; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


A = TypeVar("A", bound=Arguments)


class FunctionTool(Generic[A]):
    """A tool made of a coroutine and the pydantic model of its arguments.

    Descriptions should be short: they are part of every prompt.
    """

    def __init__(
        self,
        name: str,
        description: str,
        arguments: type[A],
        function: Callable[[A, ToolContext], Awaitable[str | ToolResult]],
        *,
        parallel: bool = False,
    ) -> None:
        self.name = name
        self.parallel = parallel
        self.definition: ToolSpec = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": _parameters(arguments)},
        }
        self._arguments = arguments
        self._function = function

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """Check the arguments and call the function."""
        try:
            checked = self._arguments.model_validate(arguments)
        except ValidationError as error:
            raise ToolInputError(f"wrong arguments for {self.name}: {_explain(error)}") from error
        result = await self._function(checked, context)
        return result if isinstance(result, ToolResult) else ToolResult(result)


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """The tools by their names; raises ValueError when two have the same."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in found:
            raise ValueError(f"there are two tools of the name {tool.name!r}; rename one")
        found[tool.name] = tool
    return found


def _parameters(arguments: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of the arguments, without what only costs tokens."""
    schema = _without_titles(arguments.model_json_schema())
    return {key: schema[key] for key in ("type", "properties", "required", "$defs") if key in schema}


def _without_titles(value: Any, *, named: bool = False) -> Any:
    """A schema without pydantic's titles; `named` tells a map of fields, where `title` is a field's name."""
    if isinstance(value, list):
        return [_without_titles(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_titles(item, named=key in ("properties", "$defs") and not named)
        for key, item in value.items()
        if named or key != "title"
    }


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors(include_url=False, include_input=False):
        name = ".".join(str(part) for part in item["loc"])
        match item["type"]:
            case "missing":
                parts.append(f"{name} is missing")
            case "extra_forbidden":
                parts.append(f"there is no argument {name}")
            case _:
                parts.append(f"{name}: {item['msg']}")
    return "; ".join(parts)

"""Turns of the built-in agent, the contract of its tools, and how to make one from a coroutine.

A call that the policy got wrong raises ToolInputError, whose message the policy reads. Anything else that a tool raises
is a failure of the infrastructure and ends the rollout.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.episodes import ContextFullError, Episode, PolicyTurn, require_sandbox
from rollout_service.tokens import ToolSpec, tool_spec
from sandboxes import ExecResult, LimitExceededError, Sandbox
from sandboxes.errors import SandboxFileError
from sandboxes.task_groups import open_task_group


async def sample_turn(episode: Episode, messages: list[Message]) -> PolicyTurn | StopReason:
    """Put the turn's text in `episode.answer`, or return why there can be no turn.

    Errors of the engine and the renderer are raised as they are.
    """
    limits, policy = episode.limits, episode.policy
    tokens_left = limits.max_tokens - policy.usage.sampled_tokens
    if tokens_left < 1:
        return StopReason.MAX_TOKENS
    try:
        save, most = episode.save_due(messages), min(limits.max_turn_tokens, tokens_left)
        with episode.pauses(episode.sandbox):
            if save is None:
                turn = await policy.respond(messages, max_tokens=most)
            else:
                async with open_task_group() as tasks:
                    tasks.start_soon(save, name="save the sandbox")
                    turn = await policy.respond(messages, max_tokens=most)
    except ContextFullError:
        return StopReason.CONTEXT_FULL
    episode.answer = turn.message.content or None
    return turn


def why_truncated(turn: PolicyTurn, episode: Episode) -> StopReason:
    if turn.context_full:
        return StopReason.CONTEXT_FULL
    if episode.policy.usage.sampled_tokens >= episode.limits.max_tokens:
        return StopReason.MAX_TOKENS
    return StopReason.TRUNCATED


class ToolInputError(Exception):
    """A tool call that cannot be carried out as the policy wrote it; the policy reads the message."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    sandbox: Sandbox | None
    seconds: float
    """Limit of the call, by the wall clock."""
    output_chars: int
    """The longest useful result; at least 256."""
    limit_violations: list[LimitExceededError] = field(default_factory=list)
    """Gets the sandbox's limits that the call reached."""
    state: dict[str, Any] = field(default_factory=dict)
    """Kept between calls of one episode, by the tool's name."""
    instance: Mapping[str, JsonValue] = field(default_factory=dict)
    episode: Episode | None = None
    """The episode of the call, with its `state`, `sampler` and `judge`; None in a test of a tool alone."""

    def require_episode(self) -> Episode:
        if self.episode is None:
            raise EnvironmentFailedError(
                "this tool works on an episode, and there is none", hint="Call it through `play`."
            )
        return self.episode


@dataclass(frozen=True, slots=True)
class ToolResult:
    text: str
    answer: str | None = None
    """Set by a tool that ends the agent."""
    failed: bool = False
    """Branches may begin at the turn (`tool_error`). A ToolInputError says so, too."""


class Tool(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def definition(self) -> ToolSpec:
        """In the OpenAI function format."""
        ...

    @property
    def parallel(self) -> bool:
        """Whether consecutive calls in one turn may run at the same time, since they change nothing."""
        ...

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """Carry out a call.

        Raises:
            ToolInputError: The call cannot be carried out as written.
        """
        ...


class Arguments(BaseModel):
    """Unknown arguments are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)


A = TypeVar("A", bound=Arguments)


class FunctionTool(Generic[A]):
    """A tool made from a coroutine and the pydantic model of its arguments.

    Keep descriptions short: they are part of every prompt.
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
        self.definition = tool_spec(name, description, _parameters(arguments))
        self._arguments = arguments
        self._function = function

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        try:
            checked = self._arguments.model_validate(arguments)
        except ValidationError as error:
            raise ToolInputError(f"wrong arguments for {self.name}: {explain(error)}") from error
        result: object = await self._function(checked, context)
        if not isinstance(result, str | ToolResult):
            raise EnvironmentFailedError(
                f"the tool {self.name!r} returned {result!r:.100}", hint="Return a text or a ToolResult."
            )
        found = result if isinstance(result, ToolResult) else ToolResult(result)
        text = cut_middle(found.text, context.output_chars)
        return found if text is found.text else replace(found, text=text)


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Index tools by name.

    Raises:
        ValueError: Two tools have the same name.
    """
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in found:
            raise ValueError(f"two tools are named {tool.name!r}; rename one")
        found[tool.name] = tool
    return found


def _parameters(arguments: type[BaseModel]) -> dict[str, Any]:
    """Leave out parts of the JSON schema that only cost tokens."""
    schema = _lean(arguments.model_json_schema())
    return {key: schema[key] for key in ("type", "properties", "required", "$defs") if key in schema}


def _lean(value: Any, *, named: bool = False) -> Any:
    """Drop pydantic's titles and null defaults; in a map of fields (`named`), `title` is a field."""
    if isinstance(value, list):
        return [_lean(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _lean(item, named=key in ("properties", "$defs") and not named)
        for key, item in value.items()
        if named or (key != "title" and not (key == "default" and item is None))
    }


def explain(error: ValidationError) -> str:
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


NO_OUTPUT = "[no output]"
MIN_LIMIT = 64
"""Leaves room for text next to the note."""


def cut_middle(text: str, limit: int) -> str:
    """Keep the beginning and the end of a long text around a note, since the middle matters least.

    The result is never longer than `limit` characters, which must be at least `MIN_LIMIT`.
    """
    if limit < MIN_LIMIT:
        raise ValueError(f"a limit of {limit} characters leaves no room for text; use {MIN_LIMIT} or more")
    if len(text) <= limit:
        return text
    # The note's length depends on the number in it, so its greatest length is reserved.
    room = limit - len(_note(len(text)))
    head = (room + 1) // 2
    tail = room - head
    return text[:head] + _note(len(text) - room) + (text[-tail:] if tail else "")


def with_notes(output: str, notes: Sequence[str], limit: int) -> str:
    """Cut the output if necessary, the notes never."""
    tail = "\n".join(notes)
    output = output.removesuffix("\n")
    if not output:
        return tail or NO_OUTPUT
    room = limit - len(tail) - 1 if tail else limit
    output = cut_middle(output, max(room, MIN_LIMIT))
    return f"{output}\n{tail}" if tail else output


def _note(missing: int) -> str:
    return f"\n[... {missing} characters cut ...]\n"


@contextmanager
def file_errors(path: str) -> Iterator[None]:
    """Report a file that cannot be used as a ToolInputError."""
    refuse_nul(path, "path")
    try:
        yield
    except SandboxFileError as error:
        raise ToolInputError(f"{error}; {error.hint}" if error.hint else str(error)) from error


def refuse_nul(text: str, name: str) -> None:
    """Refuse text that no program can take as an argument."""
    if "\0" in text:
        raise ToolInputError(f"{name} holds a NUL character")


async def run_script(script: str, arguments: Sequence[str], context: ToolContext, *, limit: int) -> ExecResult:
    """Run our script in the agent's sandbox; arguments are never part of it."""
    argv = ["bash", "--norc", "-c", script, "tool", *arguments]
    result = await require_sandbox(context.sandbox).exec(argv, timeout=context.seconds, output_limit=limit)
    context.limit_violations.extend(one for one in result.limit_violations if not one.is_of_call)
    return result

"""A client's call and its answer in one form for every dialect: the types that `dialects`, `capture` and `app` share.

A dialect reads a request into a `ModelCall` and writes `AnswerEvent`s. Capture finds the recorded turn that a call
continues, and turns sampled ids into events. Neither knows the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import orjson
from pydantic import JsonValue

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import Generation
from rollout_service.tokens import ToolSpec

if TYPE_CHECKING:
    from rollout_service.gateway.capture import PlannedTurn


class Dialect(StrEnum):
    CHAT = "openai_chat"
    RESPONSES = "openai_responses"
    ANTHROPIC = "anthropic"
    GOOGLE = "google"


@dataclass(frozen=True, slots=True)
class ClientToolCall:
    id: str | None
    """Ours; None from clients that leave ids out."""
    name: str
    arguments: str
    """As the client wrote them, usually JSON; compare them by value."""


class ClientMessage(NamedTuple):
    """Texts are as the client sent them; blocks of one message are joined in their order, and each tool result is a
    message of its own. A tuple, since a request may have thousands, and a frozen class takes several times as long.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    text: str = ""
    reasoning: str | None = None
    calls: tuple[ClientToolCall, ...] = ()
    call_id: str | None = None
    """The call that a tool's message answers; None from clients that leave ids out."""
    tool_name: str | None = None
    is_error: bool = False
    """Set by a field of a tool's message; only Anthropic's API has one."""
    turn_key: str | None = None
    """The `turn_key` of the answer that this assistant's message echoes, from wherever the dialect carries it."""
    references: frozenset[Literal["reasoning", "text", "calls"]] = frozenset()
    """The parts of that answer which the client names in the place of sending them."""


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """How a client declared a tool that the model sees as a function; its calls go back in the client's form."""

    kind: Literal["function", "custom", "local_shell", "tool_search"]
    """In the client's API; `custom` has one text as its input, and no JSON."""
    name: str
    namespace: str | None = None


Purpose = Literal["", "side", "compaction", "subagent"]


@dataclass(frozen=True, slots=True)
class Lane:
    """The conversation that a call belongs to, by its client's headers and body; unknown fields are empty."""

    client: str = ""
    """Such as `codex`, by its user agent."""
    session: str = ""
    agent: str = ""
    """A sub-agent's id; empty for the main one."""
    parent: str = ""
    purpose: Purpose = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A request for one answer, in any dialect."""

    dialect: Dialect
    model: str
    messages: tuple[ClientMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    """In the OpenAI function format; tools that cannot be offered are left out and named in `ignored`."""
    deferred_tools: tuple[ToolSpec, ...] = ()
    """Tools whose schemas stand in messages, where the client found them, and in no head. Calls are parsed with them,
    prompts are rendered without."""
    declared_tools: Mapping[str, DeclaredTool] = field(default_factory=dict)
    """The tools that the client did not declare as functions of that name, by the name of the function."""
    max_tokens: int | None = None
    stream: bool = False
    server_sent_events: bool = True
    """Else a stream is a JSON list, which Google's clients may ask for."""
    include_usage: bool = True
    """A stream ends with the usage, where the client decides."""
    json_schema: Mapping[str, Any] | None = None
    answer_format: Mapping[str, Any] | None = None
    """The form of `json_schema` in the client's API, which Responses sends back."""
    stop: tuple[str, ...] = ()
    n: int = 1
    sibling: int = 0
    """The number of this answer among the `n` of its request."""
    logprobs: bool = False
    """The answer ends with the log-probabilities of its tokens."""
    requested: Mapping[str, JsonValue] = field(default_factory=dict)
    """The client's sampling is recorded; the run decides whether it is obeyed."""
    ignored: tuple[str, ...] = ()
    """Parameters without effect, by their path, as the dialect's table says."""
    lane: Lane = Lane()
    fingerprint: bytes = b""
    """A hash of everything that makes a repeated request the same one: not of `stream`, nor of the limit of tokens."""
    kind: Literal["", "main", "side"] = ""
    """As the client of a live session declares it; empty if it does not."""
    train: bool | None = None
    """The consent of a live session's client to train on the turn; None if it does not say."""
    size: int = 0
    """Bytes of the request's body, with what its references to tools stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerUsage:
    prompt_tokens: int
    """Cached ones included."""
    cached_tokens: int
    sampled_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerBegin:
    turn_key: str
    """Names the answer in the client's echo; letters, digits and `-` only."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Calls are numbered from 0 and do not overlap."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as they were sampled if that was JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete; `error` says why it is malformed."""

    index: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Under the distribution that it was sampled from."""

    text: str
    """The token alone; U+FFFD stands for a part of a character."""
    logprob: float


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """`finish` is never `ABORT`."""

    finish: FinishReason
    usage: AnswerUsage
    stopped_by: str | None = None
    """The client's own stop string that ended the answer."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Those of all sampled tokens, reasoning and calls included; empty unless the call asks for them."""


AnswerEvent = AnswerBegin | ReasoningDelta | TextDelta | CallBegin | CallArguments | CallEnd | AnswerEnd


class TurnObserver(Protocol):
    """Keeps a turn in the place of `TurnCapture.record`."""

    @property
    def unrecorded_because(self) -> str:
        """Why the turn is not to be kept; empty if it is to be."""

    async def record(self, generation: Generation, *, delivered: bool) -> None:
        """Keep the turn, or decide not to; its last event leaves only after this has returned.

        Called once, while nothing else is planned or recorded. `delivered` is as for `TurnCapture.record`.

        Raises:
            ServiceError: It cannot be kept. The client gets an error in place of the last event.
        """

    def sent(self) -> None:
        """Note that the client was sent the last token."""


class CallObserver(Protocol):
    """Sees the calls of one session, such as to keep their turns."""

    async def planned(self, call: ModelCall, planned: PlannedTurn) -> TurnObserver:
        """Note a call whose prompt was made. Must be quick.

        Raises:
            ServiceError: It cannot be noted; the call fails.
        """
        ...

    async def refused(self, call: ModelCall) -> None:
        """Note a call for which no prompt can be made.

        Raises:
            ServiceError: It cannot be noted.
        """


def raw_call_text(name: str, arguments: str) -> str:
    """Write a malformed call as text, for dialects that cannot carry it."""
    return f"{name}({arguments})"


_INSTRUCTIONS = frozenset({"system", "developer"})
SEPARATOR = "\n\n"


def map_roles(messages: Sequence[ClientMessage]) -> tuple[ClientMessage, ...]:
    """Join the leading system and developer messages into one, and make later ones user messages.

    Chat formats allow only one system message, at the start. The mapping of a message depends only on it and on those
    before it, so a longer history maps to a longer list with the same beginning, unless it goes on with a system
    message where the first one has not ended.
    """
    leading = _leading(messages)
    head: tuple[ClientMessage, ...] = ()
    if leading:
        text = SEPARATOR.join(message.text for message in messages[:leading] if message.text)
        head = (ClientMessage("system", text),)
    later = [_as_user(each) if each.role in _INSTRUCTIONS else each for each in messages[leading:]]
    return (*head, *later)


def _as_user(message: ClientMessage) -> ClientMessage:
    return message._replace(role="user", text=f"<system>\n{message.text}\n</system>")


def _leading(messages: Sequence[ClientMessage]) -> int:
    """Return how many messages of the beginning are system and developer messages."""
    return next((place for place, each in enumerate(messages) if each.role not in _INSTRUCTIONS), len(messages))


_EITHER = "Answer with tool calls and no text beside them, or with JSON that fits this schema and nothing else:"


def with_schema_told(call: ModelCall) -> ModelCall:
    """Tell the model a schema, where forcing it would rule out calls of the tools that are offered too."""
    if call.json_schema is None or not (call.tools or call.deferred_tools):
        return call
    schema = orjson.dumps(call.json_schema).decode()
    told = ClientMessage("system", f"{_EITHER}\n{schema}")
    leading = _leading(call.messages)
    return replace(call, messages=(*call.messages[:leading], told, *call.messages[leading:]), json_schema=None)

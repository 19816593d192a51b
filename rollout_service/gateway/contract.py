"""A client's call and its answer in one form for every dialect: the types that `dialects`, `capture` and `app` share.

A dialect reads a request into a `ModelCall` and writes `AnswerEvent`s as its own body or stream. Capture finds the
recorded turn that a call continues, and turns sampled ids into events. Neither knows the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import JsonValue

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import Generation
from rollout_service.tokens import ToolSpec

if TYPE_CHECKING:
    from rollout_service.gateway.capture import PlannedTurn


class Dialect(StrEnum):
    """An API that clients speak."""

    CHAT = "openai_chat"
    RESPONSES = "openai_responses"
    ANTHROPIC = "anthropic"
    GOOGLE = "google"


@dataclass(frozen=True, slots=True)
class ClientToolCall:
    """A tool call in a client's history: the client's version of one that we sent."""

    id: str | None
    """The id that we gave it; None from clients that leave ids out."""
    name: str
    arguments: str
    """The arguments as the client wrote them, usually JSON; compare them by value."""


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """A message of a client's history.

    Texts are as the client sent them; blocks of one message are joined in their order, and each tool result is a
    message of its own.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    text: str = ""
    reasoning: str | None = None
    calls: tuple[ClientToolCall, ...] = ()
    call_id: str | None = None
    """The id of the call that a tool's message answers; None from clients that leave ids out."""
    tool_name: str | None = None
    is_error: bool = False
    """Whether a tool's message says by a field of its own that the call failed; only Anthropic's API has one."""
    turn_key: str | None = None
    """The `turn_key` of the answer that this assistant's message echoes, from wherever the dialect carries it."""


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """How a client declared a tool that the model sees as a function; its calls go back in the client's form."""

    kind: Literal["function", "custom", "local_shell", "tool_search"]
    """The kind of the calls in the client's API; `custom` has one text as its input, and no JSON."""
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Lane:
    """The conversation that a call belongs to, by its client's headers and body; unknown fields are empty."""

    client: str = ""
    """The name of the client, such as `codex`, by its user agent."""
    session: str = ""
    agent: str = ""
    """The id of a sub-agent; empty for the main one."""
    parent: str = ""
    purpose: Literal["", "side", "compaction", "subagent"] = ""
    """The call's purpose, as the client declares it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A request for one answer, whatever its dialect."""

    dialect: Dialect
    model: str
    messages: tuple[ClientMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    """In the OpenAI function format; tools that cannot be offered are left out and named in `ignored`."""
    deferred_tools: tuple[ToolSpec, ...] = ()
    """Tools that may be called although no head lists them: their schemas stand in messages, where the client found
    them. Calls are parsed with them, prompts are rendered without."""
    declared_tools: Mapping[str, DeclaredTool] = field(default_factory=dict)
    """The tools that the client did not declare as functions of that name, by the name of the function."""
    max_tokens: int | None = None
    stream: bool = False
    server_sent_events: bool = True
    """Whether a stream is one of server-sent events; Google's clients may ask for a JSON list instead."""
    include_usage: bool = True
    """Whether a stream ends with the usage, in dialects where the client decides."""
    json_schema: Mapping[str, Any] | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    sibling: int = 0
    """Which of the `n` answers of its request this call is for."""
    logprobs: bool = False
    """Whether the answer ends with the log-probabilities of its tokens."""
    requested: Mapping[str, JsonValue] = field(default_factory=dict)
    """The sampling that the client asked for. It is recorded; the run decides whether it is obeyed."""
    ignored: tuple[str, ...] = ()
    """The parameters without effect, by their path, as the dialect's table says."""
    lane: Lane = Lane()
    fingerprint: bytes = b""
    """A hash of everything that makes a repeated request the same one: not of `stream`, nor of the limit of tokens."""
    kind: Literal["", "main", "side"] = ""
    """The kind of call, as the client of a live session declares it; empty if it does not."""
    train: bool | None = None
    """Whether the client of a live session agrees that the turn is trained on; None if it does not say."""
    size: int = 0
    """The bytes of the request's body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerUsage:
    """The numbers of tokens of an answer and its prompt."""

    prompt_tokens: int
    """All of the prompt, cached ones included."""
    cached_tokens: int
    sampled_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerBegin:
    """The first event of an answer."""

    turn_key: str
    """Names the answer in the client's echo; letters, digits and `-` only."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins. Calls are numbered from 0 and do not overlap."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as they were sampled if they were sampled as JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete; `error` says why it is malformed."""

    index: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token's log-probability, under the distribution that it was sampled from."""

    text: str
    """The token alone; U+FFFD stands for a part of a character."""
    logprob: float


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The last event of an answer. `finish` is never `ABORT`."""

    finish: FinishReason
    usage: AnswerUsage
    stopped_by: str | None = None
    """The client's own stop string that ended the answer."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Those of all sampled tokens, reasoning and calls included; empty unless the call asks for them."""


AnswerEvent = AnswerBegin | ReasoningDelta | TextDelta | CallBegin | CallArguments | CallEnd | AnswerEnd


class TurnObserver(Protocol):
    """Keeps the turn of one call, in the place of `TurnCapture.record`."""

    @property
    def unrecorded_because(self) -> str:
        """Why the turn will not be kept; empty if it is to be."""

    async def record(self, generation: Generation, *, delivered: bool) -> None:
        """Keep the turn, or decide not to; its last event leaves only after this has returned.

        Called once, while nothing else is planned or recorded. `delivered` is as for `TurnCapture.record`.

        Raises:
            ServiceError: It cannot be kept. The client gets an error in place of the last event.
        """

    def sent(self) -> None:
        """Note that the client was sent the last token."""


class CallObserver(Protocol):
    """Sees the calls of one session, such as to keep their turns beyond this process."""

    async def planned(self, call: ModelCall, planned: PlannedTurn) -> TurnObserver:
        """Note a call whose prompt was made, and return the observer that keeps its turn. Must be quick.

        Raises:
            ServiceError: It cannot be noted; the call fails.
        """
        ...

    async def refused(self, call: ModelCall) -> None:
        """Note a call for which no prompt can be made.

        Raises:
            ServiceError: It cannot be noted.
        """


# How a client's system and developer messages become what chat formats allow: one system message, at the start.
#
# Guarantee: the mapping of a message depends only on it and on those before it, so a longer history maps to a longer
# list with the same beginning, unless it goes on with a system message where the first one has not ended.

_INSTRUCTIONS = frozenset({"system", "developer"})
SEPARATOR = "\n\n"


def map_roles(messages: Sequence[ClientMessage]) -> tuple[ClientMessage, ...]:
    """Join the leading system and developer messages into one, and make later ones user messages."""
    leading = 0
    while leading < len(messages) and messages[leading].role in _INSTRUCTIONS:
        leading += 1
    head: tuple[ClientMessage, ...] = ()
    if leading:
        text = SEPARATOR.join(message.text for message in messages[:leading] if message.text)
        head = (ClientMessage("system", text),)
    return head + tuple(map_later_role(message) for message in messages[leading:])


def map_later_role(message: ClientMessage) -> ClientMessage:
    """Return a message behind the first system message in the role that chat formats allow for it."""
    if message.role not in _INSTRUCTIONS:
        return message
    return replace(message, role="user", text=f"<system>\n{message.text}\n</system>")

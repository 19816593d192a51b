"""Reads requests of Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollout_service.gateway.contract import ClientMessage, ClientToolCall, Dialect, ModelCall
from rollout_service.gateway.dialects.base import fingerprint, read_lane, user_messages
from rollout_service.gateway.dialects.fields import (
    BETWEEN_PARTS,
    FORCES_NOTHING,
    SCHEMA,
    Fields,
    Parameter,
    ParameterTable,
    Sorted,
    Treatment,
    describe_tools,
    dump_json,
    invalid,
    join_content,
    parse_object,
    read_body,
    sort_parameters,
    unsupported,
    without_notes,
)
from rollout_service.tokens import ToolSpec, tool_spec

_HONORED, _RECORDED = Treatment.HONORED, Treatment.RECORDED
_IGNORED, _REFUSED = Treatment.IGNORED, Treatment.REFUSED
THREAD = "thread"

PARAMETERS = ParameterTable(
    (
        Parameter("model", _HONORED, "any name is the policy, unless the setting says otherwise"),
        Parameter("messages", _HONORED, "with `system` messages among them"),
        Parameter("system", _HONORED, "a client's block about its billing is left out"),
        Parameter("tools", _HONORED, "tools that Anthropic runs are left out and counted"),
        Parameter("tool_choice.type", _RECORDED, FORCES_NOTHING),
        Parameter("tool_choice.name", _RECORDED),
        Parameter("tool_choice.disable_parallel_tool_use", _IGNORED),
        Parameter("max_tokens", _HONORED, "may be left out"),
        Parameter("stream", _HONORED),
        Parameter("stop_sequences", _HONORED),
        Parameter("output_config.format", _HONORED, "as `output_format`"),
        Parameter("output_format", _HONORED, SCHEMA),
        Parameter("output_config.effort", _RECORDED, recorded_as="reasoning_effort"),
        *without_notes(_RECORDED, "thinking temperature top_p top_k"),
        Parameter("metadata", _IGNORED, "`user_id` may name the session of the call's lane"),
        *without_notes(_IGNORED, "cache_control context_management service_tier speed inference_geo container"),
        Parameter("mcp_servers", _IGNORED),
        Parameter(THREAD, _REFUSED, "nothing is kept between requests; send the whole history"),
        Parameter("compaction", _REFUSED, "ask for a summary in a message"),
    )
)


_BILLING = "x-anthropic-billing-header:"
"""Begins the system block with Claude Code's version, which differs between otherwise equal prompts."""
_LIMITS = frozenset({"max_tokens"})


def read_call(body: bytes, headers: Mapping[str, str]) -> ModelCall:
    """Read a request for an answer, or one to count tokens."""
    fields = read_body(body)
    notes = sort_parameters(fields, PARAMETERS)
    _check_tool_choice(fields)
    offered, deferred = _read_tools(fields, notes)
    reader = MessageReader({tool["function"]["name"]: tool for tool in (*offered, *deferred)}, notes)
    messages = [*_read_system(fields, notes), *reader.read(fields)]
    if not fields.items("messages"):
        invalid("messages", "is required, and must not be empty")
    lane = read_lane(headers, _session(fields))
    return ModelCall(
        dialect=Dialect.ANTHROPIC,
        model=fields.text("model") or "",
        messages=tuple(messages),
        tools=offered,
        deferred_tools=deferred,
        max_tokens=fields.integer("max_tokens"),
        stream=bool(fields.boolean("stream")),
        json_schema=_read_schema(fields),
        stop=fields.texts("stop_sequences"),
        requested=notes.requested,
        ignored=tuple(notes.ignored),
        lane=lane,
        fingerprint=fingerprint(Dialect.ANTHROPIC, fields, lane, limits=_LIMITS),
        size=len(body) + reader.referenced,
    )


def _read_system(fields: Fields, notes: Sorted) -> list[ClientMessage]:
    def part(block: Fields) -> str | None:
        text = block.text("text") or ""
        if block.text("type") not in (None, "text"):
            notes.ignore(f"system[type={block.text('type')}]")
        return None if text.startswith(_BILLING) else text

    text = join_content(fields, "system", part, BETWEEN_PARTS)
    return [ClientMessage("system", text)] if text else []


def _read_tools(fields: Fields, notes: Sorted) -> tuple[tuple[ToolSpec, ...], tuple[ToolSpec, ...]]:
    """Return the head's tools, and those that the client makes known later by a reference."""
    offered: list[ToolSpec] = []
    deferred: list[ToolSpec] = []
    for tool in fields.objects("tools"):
        schema = tool.object("input_schema")
        if schema is None:
            if (form := tool.text("type")) in (None, "custom"):
                invalid(tool.at("input_schema"), "is required")
            notes.ignore(f"tools[type={form}]")
            continue
        spec = tool_spec(tool.required_text("name"), tool.text("description"), schema.values)
        (deferred if tool.boolean("defer_loading") else offered).append(spec)
    return tuple(offered), tuple(deferred)


def _check_tool_choice(fields: Fields) -> None:
    choice = fields.object("tool_choice")
    if choice is None:
        return
    form = choice.required_text("type")
    if form not in ("auto", "any", "tool", "none"):
        invalid(choice.at("type"), "must be auto, any, tool or none")
    if form == "tool":
        choice.required_text("name")


def _read_schema(fields: Fields) -> Mapping[str, Any] | None:
    config = fields.object("output_config")
    form = (config and config.object("format")) or fields.object("output_format")
    if form is None:
        return None
    if form.required_text("type") != "json_schema":
        invalid(form.at("type"), "must be json_schema")
    schema = form.object("schema") or invalid(form.at("schema"), "is required")
    return schema.values


def _session(fields: Fields) -> str:
    """Read the session from a JSON text that Claude Code puts into its metadata."""
    metadata = fields.object("metadata")
    session = (parse_object((metadata and metadata.text("user_id")) or "") or {}).get("session_id")
    return session if isinstance(session, str) else ""


_MEDIA = {"image": "an image", "audio": "audio", "video": "a video"}
_TEXTS_OF_DOCUMENTS = {"text": "data", "content": "content"}
"""The fields of their sources that are read, by the types of these."""
_MAX_REFERENCED = 4 * 1024 * 1024
"""Characters that references to tools may stand for; a reference is short, and its tool may be long."""


class MessageReader:
    """Reads the messages of one request: lists of blocks, of which one message may hold several results."""

    def __init__(self, tools: Mapping[str, ToolSpec], notes: Sorted) -> None:
        self._tools = tools
        self._notes = notes
        self.referenced = 0
        """Characters that references stand for."""

    def read(self, fields: Fields) -> Iterator[ClientMessage]:
        """Make each result of a tool a message of its own, in the client's order."""
        for message in fields.objects("messages"):
            role = message.required_text("role")
            match role:
                case "assistant":
                    yield self._assistant(message)
                case "user":
                    yield from self._user(message)
                case "system":
                    yield ClientMessage("system", join_content(message, "content", self._text, BETWEEN_PARTS))
                case _:
                    invalid(message.at("role"), "must be user, assistant or system")

    def _assistant(self, message: Fields) -> ClientMessage:
        content = message.values.get("content")
        if content is None or type(content) is str:
            return ClientMessage("assistant", content or "")
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ClientToolCall] = []
        turn_key: str | None = None
        for block in message.objects("content"):
            match block.required_text("type"):
                case "text":
                    texts.append(block.text("text") or "")
                case "thinking":
                    thoughts.append(block.text("thinking") or "")
                    turn_key = block.text("signature") or turn_key
                case "tool_use":
                    calls.append(_call(block))
                case "redacted_thinking":
                    invalid(block.path, "is of another service: this one never hides a thought")
                case form:
                    self._skip(block, form)
        reasoning = "".join(thoughts) or None
        return ClientMessage("assistant", "".join(texts), reasoning, tuple(calls), turn_key=turn_key)

    def _user(self, message: Fields) -> Iterator[ClientMessage]:
        content = message.values.get("content")
        if content is None or type(content) is str:
            yield ClientMessage("user", content or "")
            return
        blocks = message.objects("content")
        yield from user_messages(
            self._result(block) if block.text("type") == "tool_result" else self._text(block) for block in blocks
        )

    def _result(self, block: Fields) -> ClientMessage:
        text = join_content(block, "content", self._text, BETWEEN_PARTS)
        is_error = block.values.get("is_error") is True
        return ClientMessage("tool", text, call_id=block.text("tool_use_id") or None, is_error=is_error)

    def _text(self, block: Fields) -> str | None:
        form = block.required_text("type")
        if form == "text":
            return block.text("text") or ""
        if form == "tool_reference":
            return self._reference(block)
        if form == "document":
            return self._document(block)
        if form == "search_result":
            head = [block.required_text("title"), block.required_text("source")]
            return "\n".join([*head, join_content(block, "content", self._text, BETWEEN_PARTS)])
        self._skip(block, form)
        return None

    def _reference(self, block: Fields) -> str:
        name = block.required_text("tool_name")
        tool = self._tools.get(name)
        text = describe_tools([tool]) if tool else name
        self.referenced += len(text)
        if self.referenced > _MAX_REFERENCED:
            invalid(block.path, f"is one of references to more than {_MAX_REFERENCED} characters of tools")
        return text

    def _document(self, block: Fields) -> str:
        source = block.object("source") or Fields({})
        field = _TEXTS_OF_DOCUMENTS.get(source.text("type") or "") or unsupported(block.path, "a file")
        text = join_content(source, field, self._text, BETWEEN_PARTS)
        return "\n".join(filter(None, [block.text("title"), block.text("context"), text]))

    def _skip(self, block: Fields, form: str) -> None:
        if form in _MEDIA:
            unsupported(block.path, _MEDIA[form])
        self._notes.ignore(f"messages[].content[type={form}]")


def _call(block: Fields) -> ClientToolCall:
    arguments = block.values.get("input")
    text = dump_json({} if arguments is None else arguments)
    return ClientToolCall(block.text("id") or None, block.required_text("name"), text)

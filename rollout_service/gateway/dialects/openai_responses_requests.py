"""Reads requests of Responses. An answer of ours comes back as several items, and is one message again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

from rollout_service.gateway.contract import ClientMessage, ClientToolCall, DeclaredTool, Dialect, ModelCall
from rollout_service.gateway.dialects.base import FoldedAnswer, check_tool_choice, fingerprint, read_lane, read_schema
from rollout_service.gateway.dialects.fields import (
    BETWEEN_PARTS,
    FORCES_NOTHING,
    SCHEMA,
    Fields,
    Parameter,
    ParameterTable,
    Sorted,
    Treatment,
    custom_call,
    custom_tool,
    describe_tools,
    dump_json,
    invalid,
    join_content,
    read_body,
    sort_parameters,
    unsupported,
    without_notes,
)
from rollout_service.gateway.errors import RefusedParameterError
from rollout_service.tokens import ToolSpec, tool_spec

_HONORED, _RECORDED = Treatment.HONORED, Treatment.RECORDED
_IGNORED, _REFUSED = Treatment.IGNORED, Treatment.REFUSED
_WHOLE_HISTORY = "nothing is kept between requests; send the whole history"

PARAMETERS = ParameterTable(
    (
        Parameter("model", _HONORED, "any name is the policy, unless the setting says otherwise"),
        Parameter("input", _HONORED),
        Parameter("instructions", _HONORED),
        Parameter(
            "tools",
            _HONORED,
            "`function`, `custom`, `namespace`, `local_shell`, `tool_search`; others are left out",
        ),
        Parameter("tool_choice", _RECORDED, FORCES_NOTHING),
        Parameter("max_output_tokens", _HONORED),
        Parameter("stream", _HONORED),
        Parameter("text.format", _HONORED, SCHEMA),
        Parameter("text.verbosity", _IGNORED),
        *without_notes(_RECORDED, "temperature top_p reasoning"),
        Parameter("store", _IGNORED, "nothing is kept"),
        Parameter("include", _IGNORED, "reasoning always has its `encrypted_content`"),
        *without_notes(_IGNORED, "metadata client_metadata user safety_identifier service_tier"),
        Parameter("prompt_cache_key", _IGNORED, "names the session of the call's lane"),
        *without_notes(_IGNORED, "prompt_cache_retention parallel_tool_calls max_tool_calls stream_options"),
        Parameter("truncation", _IGNORED, "a prompt that is too long is an error"),
        Parameter("context_management", _IGNORED),
        Parameter("top_logprobs", _REFUSED, "log-probabilities are in the trajectory"),
        Parameter("previous_response_id", _REFUSED, _WHOLE_HISTORY),
        Parameter("conversation", _REFUSED, _WHOLE_HISTORY),
        Parameter("background", _REFUSED, _WHOLE_HISTORY),
        Parameter("prompt", _REFUSED, "no prompts are stored; send its text"),
    )
)


_LOGPROBS = "message.output_text.logprobs"
_LIMITS = frozenset({"max_output_tokens"})


def read_call(body: bytes, headers: Mapping[str, str]) -> ModelCall:
    fields = read_body(body)
    notes = sort_parameters(fields, PARAMETERS)
    if _LOGPROBS in fields.items("include"):
        raise RefusedParameterError.at("include", "is not supported: log-probabilities are in the trajectory")
    check_tool_choice(fields)
    tools = ToolReader(notes)
    head = list(tools.read(fields))
    items = ItemReader(tools, notes)
    instructions = fields.text("instructions")
    messages = [ClientMessage("system", instructions)] if instructions else []
    messages += items.read(fields)
    if not fields.values.get("input"):
        invalid("input", "is required, and must not be empty")
    lane = read_lane(headers, fields.text("prompt_cache_key") or "")
    form = (fields.object("text") or Fields({})).object("format")
    return ModelCall(
        dialect=Dialect.RESPONSES,
        model=fields.text("model") or "",
        messages=tuple(messages),
        tools=(*head, *items.head_tools),
        deferred_tools=tuple(items.found_tools),
        declared_tools=tools.declared,
        max_tokens=fields.integer("max_output_tokens"),
        stream=bool(fields.boolean("stream")),
        json_schema=read_schema(form),
        answer_format=form.values if form else None,
        requested=notes.requested,
        ignored=tuple(notes.ignored),
        lane=lane,
        fingerprint=fingerprint(Dialect.RESPONSES, fields, lane, limits=_LIMITS),
        size=len(body),
    )


_MEDIA = {"input_image": "an image", "input_file": "a file", "input_audio": "audio"}
_OUTPUTS = frozenset(
    {"function_call_output", "custom_tool_call_output", "local_shell_call_output", "tool_search_output"}
)
_CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call", "tool_search_call"})
_OUR_ITEM = re.compile(r"([a-z]+)_([A-Za-z0-9-]+)_\d+")
"""Made by `item_id`; group 1 is its prefix, group 2 the key of the turn."""
_PARTS: Mapping[str, Literal["reasoning", "text"]] = {"rs": "reasoning", "msg": "text"}
"""By the prefixes of their items; those of calls have others."""


def item_id(prefix: str, turn_key: str, index: int) -> str:
    """Make an id from which the echo of an item can be told."""
    return f"{prefix}_{turn_key}_{index}"


class ItemReader:
    def __init__(self, tools: ToolReader, notes: Sorted) -> None:
        self.head_tools: list[ToolSpec] = []
        """Added to the head by items."""
        self.found_tools: list[ToolSpec] = []
        """Found by the client for the model; they stand where they were found."""
        self._tools = tools
        self._notes = notes

    def read(self, fields: Fields) -> Iterator[ClientMessage]:
        """Fold the items of an answer into one message."""
        value = fields.values.get("input")
        if isinstance(value, str):
            yield ClientMessage("user", value)
            return
        answer: FoldedAnswer | None = None
        for item in fields.objects("input"):
            form = item.text("type") or ("message" if "role" in item.values else "item_reference")
            if _is_of_answer(item, form):
                if answer and form == "item_reference" and _key(item) != (answer.turn_key or _key(item)):
                    yield answer.message()
                    answer = None
                answer = answer or FoldedAnswer()
                self._fold(item, form, answer)
                continue
            message = self._other(item, form)
            if message is None:
                continue
            if answer:
                yield answer.message()
                answer = None
            yield message
        if answer:
            yield answer.message()

    def _fold(self, item: Fields, form: str, answer: FoldedAnswer) -> None:
        match form:
            case "message":
                answer.texts.append(join_content(item, "content", self._text, ""))
            case "reasoning":
                answer.thoughts.append(_thought(item))
                answer.turn_key = item.text("encrypted_content") or answer.turn_key
            case "function_call":
                name = flat_name(item.text("namespace"), item.required_text("name"))
                answer.calls.append(ClientToolCall(_call_id(item), name, item.text("arguments") or ""))
            case "custom_tool_call":
                name = flat_name(item.text("namespace"), item.required_text("name"))
                answer.calls.append(custom_call(_call_id(item), name, item.text("input") or ""))
            case "local_shell_call":
                answer.calls.append(_shell_call(item))
            case "tool_search_call":
                arguments = item.values.get("arguments")
                text = arguments if isinstance(arguments, str) else dump_json(arguments or {})
                answer.calls.append(ClientToolCall(_call_id(item), TOOL_SEARCH, text))
            case "item_reference":
                ours = _OUR_ITEM.fullmatch(item.required_text("id"))
                if ours is None:
                    invalid(item.at("id"), "names no item of an answer: send the item itself")
                answer.references.add(_PARTS.get(ours[1], "calls"))
        answer.turn_key = answer.turn_key or _key(item)

    def _other(self, item: Fields, form: str) -> ClientMessage | None:
        if form == "message":
            role = item.required_text("role")
            if role not in ("system", "developer", "user"):
                invalid(item.at("role"), "must be system, developer, user or assistant")
            text = join_content(item, "content", self._text, BETWEEN_PARTS)
            return ClientMessage(cast("Literal['system', 'developer', 'user']", role), text)
        if form in _OUTPUTS:
            return ClientMessage("tool", self._output(item, form), call_id=_call_id(item))
        if form == "additional_tools":
            self.head_tools += self._tools.read(item)
            return None
        self._notes.ignore(f"input[type={form}]")
        return None

    def _output(self, item: Fields, form: str) -> str:
        if form != "tool_search_output":
            return join_content(item, "output", self._text, BETWEEN_PARTS)
        found = list(self._tools.read(item))
        self.found_tools += found
        return describe_tools(found)

    def _text(self, part: Fields) -> str | None:
        form = part.required_text("type")
        if form in ("input_text", "output_text", "text", "reasoning_text", "summary_text"):
            return part.text("text") or ""
        if form == "refusal":
            return part.text("refusal") or ""
        if form in _MEDIA:
            unsupported(part.path, _MEDIA[form])
        self._notes.ignore(f"input[].content[type={form}]")
        return None


def _is_of_answer(item: Fields, form: str) -> bool:
    return (
        form in ("reasoning", "item_reference")
        or form in _CALLS
        or (form == "message" and item.text("role") == "assistant")
    )


def _key(item: Fields) -> str | None:
    """Return the key of the turn that an item is named after, if it is ours."""
    ours = _OUR_ITEM.fullmatch(item.text("id") or "")
    return ours[2] if ours else None


def _thought(item: Fields) -> str:
    """Read the reasoning once: an item may hold it as it is, and as its summary."""
    whole = "".join(part.text("text") or "" for part in item.objects("content"))
    return whole or "".join(part.text("text") or "" for part in item.objects("summary"))


def _shell_call(item: Fields) -> ClientToolCall:
    action = item.object("action")
    kept = {} if action is None else {name: value for name, value in action.values.items() if value is not None}
    kept.pop("type", None)
    return ClientToolCall(_call_id(item), LOCAL_SHELL, dump_json(kept))


def _call_id(item: Fields) -> str | None:
    return item.text("call_id") or item.text("id") or None


LOCAL_SHELL, TOOL_SEARCH = "local_shell", "tool_search"
_STRINGS = {"type": "array", "items": {"type": "string"}}
_SHELL_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": _STRINGS,
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
}
_SEARCH_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
    "required": ["query"],
}


def flat_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


class ToolReader:
    """Makes functions of the tools of a request: namespaces get flat names, tools of other kinds one schema each."""

    def __init__(self, notes: Sorted) -> None:
        self.declared: dict[str, DeclaredTool] = {}
        self._notes = notes

    def read(self, fields: Fields) -> Iterator[ToolSpec]:
        """Leave out and name tools that cannot be offered."""
        for tool in fields.objects("tools"):
            yield from self._tool(tool, None)

    def _tool(self, tool: Fields, namespace: str | None) -> Iterator[ToolSpec]:
        form = tool.text("type") or "function"
        match form:
            case "namespace" if namespace is None:
                inner = tool.required_text("name")
                for one in tool.objects("tools"):
                    yield from self._tool(one, inner)
            case "function":
                parameters = tool.object("parameters")
                name = self._declare("function", tool.required_text("name"), namespace)
                yield tool_spec(name, tool.text("description"), parameters.values if parameters else None)
            case "custom":
                grammar = tool.object("format")
                name = self._declare("custom", tool.required_text("name"), namespace)
                yield custom_tool(name, tool.text("description"), grammar.values if grammar else None)
            case "local_shell":
                self._declare("local_shell", LOCAL_SHELL, None)
                yield tool_spec(LOCAL_SHELL, "Run a command.", _SHELL_PARAMETERS)
            case "tool_search" if tool.text("execution") == "client":
                parameters = tool.object("parameters")
                self._declare("tool_search", TOOL_SEARCH, None)
                description = tool.text("description") or "Find more tools."
                yield tool_spec(TOOL_SEARCH, description, parameters.values if parameters else _SEARCH_PARAMETERS)
            case _:
                self._notes.ignore(f"tools[type={form}]")

    def _declare(
        self,
        kind: Literal["function", "custom", "local_shell", "tool_search"],
        name: str,
        namespace: str | None,
    ) -> str:
        flat = flat_name(namespace, name)
        if kind != "function" or namespace:
            self.declared[flat] = DeclaredTool(kind, name, namespace)
        return flat

"""Messages to token ids and back, in a model's own chat format.

With `formats`, the only module that uses the `renderers` library.

- `bridge` returns ids that start with exactly those of the previous prompt and output, or None.
- `parse` never raises, whatever the ids, tells well-formed tool calls from malformed ones, and keeps the sampled text
  of their arguments, white space and types included.
- No text of a message becomes a control token: a tool's output cannot end its own turn. In a system message, which the
  environment's author writes, this holds only for tokens marked as special.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from api_schemas.trajectories import Message, ToolCall
from rollout_service.base.strict_json import MAX_DEPTH, measure_depth
from rollout_service.tokens import template_bridge
from rollout_service.tokens.arguments import ArgumentReader
from rollout_service.tokens.errors import RendererMismatchError, RenderError
from rollout_service.tokens.formats import ends_of_turn, format_config, resolve_format
from rollout_service.tokens.misread_turns import MisreadTurns, read_fenced_calls_in_full
from rollout_service.tokens.tokenizer import (
    ChatTokenizer,
    SpecialTokenEscaper,
    TokenBytes,
    TransformersTokenizer,
    load_tokenizer,
)

ToolSpec = Mapping[str, Any]
"""A tool in the OpenAI function format: `{"type": "function", "function": {"name", "description", ...}}`."""


def tool_spec(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> ToolSpec:
    """Define a tool; `parameters` is the JSON schema of its arguments, None if it has none."""
    schema = dict(parameters or {"type": "object", "properties": {}})
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": schema},
    }


_TAGS_IN_TEXT = {"deepseek-v4"}
"""Formats whose tags of calls are not tokens of their own."""
_AFTER_A_STOP = {"laguna-xs.2": "\n", "laguna-m.1": "\n"}
"""Text after a sampled end of turn that the library's render writes and its bridge omits."""

_READ_LAST_TURN = frozenset({"qwen3", "qwen3-vl", "qwen3.5"})
"""Formats that read only the part of a prompt that follows its last end of turn; the rest of a long one is not
copied."""

_USUAL_CHARS = 4
"""Characters of a token in most texts; shorter texts are not counted before they are rendered."""
_PIECE_CHARS = 32 * 1024
_PIECES_AT_MOST = 1.25
"""Tokens that the pieces of a text may have for each of the whole text, with much to spare."""

_REMEMBERED_END, _REMEMBERED_ENDS = 64, 64
"""Ids of a remembered end of a prompt, and how many are remembered: nearly all prompts end alike."""

_OWN_ENCODERS = frozenset({"gpt-oss"})
"""Formats that encode texts themselves, and never as control tokens."""


_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_HALF_PAIR = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which a policy can escape in JSON. UTF-8 has none, so nobody could read its rollout."""
_LIBRARY_ERRORS = (ValueError, RecursionError, TypeError, AttributeError, KeyError, IndexError)
"""Raised by the library on odd input. It reads a policy's output with json.loads, and not only syntax errors make that
fail: numbers may have too many digits, brackets may be nested too deep, objects may be in the place of strings."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The content of a completion, for tools and for people; training uses only the ids."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    closed: bool
    """Ended by the policy with a stop token."""


class ChatRenderer:
    """A model's chat format with its tokenizer; immutable, and safe to share between threads."""

    def __init__(self, backend: Any, tokenizer: ChatTokenizer, name: str, more_stops: Sequence[int] = ()) -> None:
        self.name = name
        self.vocab_size = len(tokenizer)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*backend.get_stop_token_ids(), *more_stops]))
        self._backend = backend
        self._tokenizer = tokenizer
        self._stop = frozenset(self.stop_token_ids)
        tool_parser = backend.config.tool_parser if name == "default" else None
        self._arguments = ArgumentReader(tokenizer, name, tool_parser)
        self._misread = MisreadTurns(tokenizer, name)
        self._known_begin = lru_cache(_REMEMBERED_ENDS)(self._find_begin)
        escaped = name not in _OWN_ENCODERS
        self._escaper = tokenizer.escaper() if escaped else SpecialTokenEscaper(())
        self._system_escaper = tokenizer.escaper(special_only=True) if escaped else SpecialTokenEscaper(())

    @property
    def rereads_history(self) -> bool:
        """Whether each bridge costs as much as a render of the whole conversation."""
        return self.name == "default"

    @property
    def token_bytes(self) -> TokenBytes | None:
        """None if they are not known. The first use takes a while: use a thread."""
        return self._tokenizer.token_bytes

    @classmethod
    def load(
        cls,
        tokenizer_path: str | Path,
        renderer_name: str = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> ChatRenderer:
        """Load the tokenizer of a folder or hub name, and the chat format.

        `auto` goes by the hub name, or by `model_type` in the folder's `config.json`. `options` are the
        format's own, as in `{"enable_thinking": False}`. Earlier reasoning stays in the context across user
        messages (`{"thinking_retention": "all"}`) unless an option says otherwise, because removing it
        begins a new segment at each of them.

        Raises:
            TokenizerNotFoundError: There is no readable tokenizer.
            UnknownRendererError: The name is unknown, or `auto` cannot tell.
            RendererMismatchError: The tokenizer lacks the format's control tokens, or an option is wrong.
        """
        # Imported here because it takes a second, which commands without a renderer need not pay.
        from renderers import create_renderer

        from rollout_service.tokens.tagged_text import find_tags_in_linear_time

        path = str(tokenizer_path)
        name = resolve_format(path, renderer_name)
        config = format_config(name, options or {})
        tokenizer = load_tokenizer(path, with_template=name == "default")
        if name == "default":
            read_fenced_calls_in_full()
        try:
            backend = create_renderer(tokenizer, config)
        except (AssertionError, TypeError, ValueError) as error:
            raise RendererMismatchError(
                f"the tokenizer at {path!r} does not fit the chat format {name!r}: {error}",
                hint="Name the format that the model was trained with, as in renderer = 'qwen3'.",
            ) from error
        if name in _TAGS_IN_TEXT:
            find_tags_in_linear_time(tokenizer)
        return cls(backend, tokenizer, name, ends_of_turn(path) if name == "default" else ())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def count_if_over(self, texts: Iterable[str], most: int) -> int | None:
        """Estimate the tokens of texts if these are surely more than `most`; else return None.

        Long texts are encoded in pieces, and no further than until there are too many. So to refuse a text costs time
        and memory by the limit, not by its length.
        """
        trimmed = [text.strip() for text in texts]  # as many formats do
        chars = sum(map(len, trimmed))
        if chars <= _USUAL_CHARS * most:
            return None
        counted = read = 0
        for text in trimmed:
            for begin in range(0, len(text), _PIECE_CHARS):
                piece = text[begin : begin + _PIECE_CHARS]
                counted, read = counted + len(self.encode(piece)), read + len(piece)
                if counted > _PIECES_AT_MOST * most:
                    return counted * chars // read
        return None

    def decode(self, ids: Sequence[int]) -> str:
        """Include control tokens; bytes that are not valid UTF-8 become U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Render a whole conversation, up to where the assistant's next turn begins.

        Raises:
            RenderError: The chat format has no place for these messages.
        """
        try:
            options = {"tools": list(tools) or None, "add_generation_prompt": True}
            return list(self._guarded(self._backend.render_ids, self._wire(messages), **options))
        except ValueError as error:
            roles = ", ".join(message.role for message in messages) or "none"
            raise RenderError(
                f"the chat format {self.name!r} cannot render these messages ({roles:.200}): {error}",
                hint="Begin with a system or user message, and answer every tool call.",
            ) from error

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        history: Sequence[Message] = (),
    ) -> list[int] | None:
        """Extend a prompt and its output by new messages; return None if the extension cannot be proven.

        Nothing that came before is rendered again: the result starts with `prompt_ids + completion_ids`. An output that
        was cut off is closed as context. For the proof, a format known only by its template needs the `history` up to
        and including the parsed output.
        """
        new = self.bridge_after(prompt_ids, completion_ids, new_messages, tools, history)
        return None if new is None else [*prompt_ids, *completion_ids, *new]

    def bridge_after(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        history: Sequence[Message] = (),
    ) -> list[int] | None:
        """Return only the ids that `bridge` adds, or None as it does."""
        try:
            if self.name == "default":
                return self._extend_by_template(prompt_ids, completion_ids, new_messages, tools, history)
            return self._extend(prompt_ids, completion_ids, new_messages, tools)
        except ValueError:  # the messages have no place in the format; the render that follows says so
            return None

    def parse(
        self,
        completion_ids: Sequence[int],
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[ToolSpec] = (),
        call_prefix: str = "call",
    ) -> ParsedTurn:
        """Never raise, whatever the ids.

        The prompt shows whether a block of reasoning is already open. Calls get the ids `{call_prefix}-{index}` if the
        chat format has none for them.
        """
        ids = list(completion_ids)
        closed = not self._stop.isdisjoint(ids)
        prompt = list(prompt_ids[self._read_from(prompt_ids) :]) if prompt_ids else None
        try:
            framed = self._misread.framed(ids)
            parsed = self._backend.parse_response(framed, tools=list(tools) or None, prompt_ids=prompt)
            content, found = self._misread.read(parsed, framed, tools)
            found = self._arguments.read(found, framed, tools)
        except _LIBRARY_ERRORS:
            raw = self.decode(ids)
            call = ToolCall(id=f"{call_prefix}-0", name=None, arguments=None, raw=raw, error="unparseable")
            return ParsedTurn(content="", reasoning=None, tool_calls=(call,), closed=closed)
        calls: list[ToolCall] = []
        own_ids = [f"{call_prefix}-{i}" for i in range(len(found))]
        taken = set(own_ids)
        for one, own_id in zip(found, own_ids, strict=True):
            calls.append(_to_call(one, own_id, taken))
            taken.add(calls[-1].id)
        return ParsedTurn(content, parsed.reasoning_content, tuple(calls), closed)

    def begins_in_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        end = tuple(prompt_ids[self._read_from(prompt_ids) :])
        return self._known_begin(end) if len(end) <= _REMEMBERED_END else self._find_begin(end)

    def _find_begin(self, prompt_end: tuple[int, ...]) -> bool:
        return self.parse(self.encode("x"), prompt_end).reasoning is not None

    def _read_from(self, prompt_ids: Sequence[int]) -> int:
        if self.name not in _READ_LAST_TURN:
            return 0
        ends = (i for i in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[i] in self._stop)
        return next(ends, 0)

    def _wire(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        system, other = self._system_escaper, self._escaper
        try:
            return [
                _to_wire(message, system if message.role in ("system", "developer") else other) for message in messages
            ]
        except RecursionError as error:
            raise ValueError("a tool call's arguments are nested too deep") from error

    def _extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        read = list(prompt[self._read_from(prompt) :])
        rendered = self._guarded(
            self._backend.bridge_to_next_turn,
            read,
            list(completion),
            self._wire(new),
            tools=list(tools) or None,
        )
        if rendered is None:
            return None
        ids: list[int] = rendered.token_ids
        # A renderer may drop tokens sampled after a stop token; this module never drops sampled tokens.
        before = [*read, *completion]
        if ids[: len(before)] != before:
            return None
        sampled_end = bool(completion) and completion[-1] in self._stop
        forgotten = _AFTER_A_STOP.get(self.name) if sampled_end else None
        return [*(self.encode(forgotten) if forgotten else ()), *ids[len(before) :]]

    def _extend_by_template(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSpec],
        history: Sequence[Message],
    ) -> list[int] | None:
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, TransformersTokenizer) or self._ends_in_reasoning(prompt, completion):
            return None
        options = {**(self._backend.config.model_extra or {}), **({"tools": list(tools)} if tools else {})}

        def write(wire: list[dict[str, Any]], begin_turn: bool) -> str:
            return str(self._guarded(tokenizer.template_text, wire, add_generation_prompt=begin_turn, **options))

        stops = {self.decode([token]): token for token in self.stop_token_ids}
        template = template_bridge.Template(write, tokenizer.encode, stops)
        return template_bridge.extend(template, completion, self._wire(history), self._wire(new))

    def _ends_in_reasoning(self, prompt: Sequence[int], completion: Sequence[int]) -> bool:
        try:
            parsed = self._backend.parse_response(list(completion), prompt_ids=list(prompt))
        except _LIBRARY_ERRORS:
            return True  # it cannot be parsed, so nothing is proven
        return parsed.reasoning_complete is False

    def _guarded(self, function: Any, *args: Any, **options: Any) -> Any:
        """Raise only `ValueError`: the library's exception depends on the shape of a message."""
        try:
            return function(*args, **options)
        except (*_LIBRARY_ERRORS, AssertionError, TemplateError) as error:
            raise ValueError(str(error)) from error


def _to_wire(message: Message, escaper: SpecialTokenEscaper) -> dict[str, Any]:
    """Return it, escaped, in the OpenAI chat format."""
    # Few formats know the role "developer"; the others would leave out its messages.
    role = "system" if message.role == "developer" else message.role
    wire: dict[str, Any] = {"content": message.content}
    if message.reasoning is not None:
        wire["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        wire["name"] = message.name
    if message.tool_calls:
        wire["content"], wire["tool_calls"] = _split_calls(message)
    for name, value in wire.items():
        wire[name] = escaper.escape(value) if isinstance(value, str) else escaper.escape_all(value)
    wire["role"] = role
    return wire


def _split_calls(message: Message) -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the well-formed calls; malformed ones stay in the text as they were written."""
    broken = [call.raw for call in message.tool_calls if call.error]
    calls = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
        if not call.error
    ]
    return "\n".join(filter(None, [message.content, *broken])), calls


def _to_call(parsed: Any, default_id: str, taken: Container[str]) -> ToolCall:
    """Mark the call as malformed unless it has a name and arguments that JSON can represent."""
    error = None if parsed.status == "ok" else str(parsed.status)
    arguments = parsed.arguments
    name = parsed.name if _is_text(parsed.name) else None
    if error is None and name is None:
        error = "missing_name"
    if error is None:
        error = _argument_error(arguments) or _misplaced_arguments(arguments, parsed.raw)
    # Some formats let the policy choose the ids of its calls, and it may give the same id twice, or one of ours.
    named = _is_text(parsed.id) and parsed.id not in taken
    return ToolCall.model_construct(
        id=parsed.id if named else default_id,
        name=name,
        arguments=None if error else arguments,
        raw=parsed.raw,
        error=error,
    )


def _misplaced_arguments(arguments: Any, raw: str) -> str | None:
    """Return an error if a call in JSON has something else than arguments, for which the library reads none."""
    try:
        call = json.loads(raw) if arguments == {} else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    others = [value for key, value in call.items() if key not in ("name", "type", "id")]
    return "misplaced_arguments" if any(value not in ({}, None) for value in others) else None


def _is_text(value: Any) -> bool:
    """Return whether it is a text that is not empty and that UTF-8 can encode."""
    return isinstance(value, str) and value != "" and not _HALF_PAIR.search(value)


def _argument_error(arguments: Any) -> str | None:
    """Return why a tool cannot take these arguments: not an object, a NaN, a lone surrogate, or nesting too deep."""
    if not isinstance(arguments, dict):
        return "arguments_not_an_object"
    if measure_depth(arguments) > MAX_DEPTH:
        return "arguments_not_json"
    try:
        _STRICT.encode(arguments).encode()
    except (ValueError, RecursionError):
        return "arguments_not_json"
    return None

"""Messages to token ids and back, in a model's own chat format.

The only module that knows the `renderers` library. It guarantees that

- `bridge` returns ids that start with the previous prompt and output, to the id, or nothing at all;
- `parse` raises on no ids whatever, and tells well-formed tool calls from malformed ones;
- in the formats of `_CONTROL_TOKENS_BY_ID`, a text that looks like a control token does not become one, so that
  no tool's output can end its own turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from api_schemas.trajectories import Message, ToolCall
from rollout_service.tokens import template_bridge
from rollout_service.tokens.errors import RendererMismatchError, RenderError, UnknownRendererError
from rollout_service.tokens.tokenizer import ChatTokenizer, FastTokenizer, load_tokenizer, read_json

ToolSpec = Mapping[str, Any]
"""A tool in the OpenAI function format: `{"type": "function", "function": {"name", "description", ...}}`."""

_BY_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_vl": "qwen3-vl",
    "qwen3_vl_moe": "qwen3-vl",
    "qwen3_5": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "kimi_k2": "kimi-k2",
    "minimax_m2": "minimax-m2",
    "gemma4": "gemma4",
}
"""Model types that have one chat format. `llama`, `qwen2` or `deepseek_v3` have many, so they must be named."""

_CONTROL_TOKENS_BY_ID = frozenset({"qwen3", "qwen3.5", "glm-4.5"})
"""Formats that put control tokens in by id and never by text; tests hold that of each."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a completion says, for tools and for people; training uses the ids alone."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    closed: bool
    """Whether the policy ended the turn with a stop token."""

    @property
    def malformed(self) -> bool:
        """Whether any tool call is malformed."""
        return any(call.error for call in self.tool_calls)


class ChatRenderer:
    """One model's chat format with its tokenizer; immutable, and safe to share between threads."""

    def __init__(self, backend: Any, tokenizer: ChatTokenizer, name: str) -> None:
        self.name = name
        self.vocab_size = len(tokenizer)
        self.stop_token_ids: tuple[int, ...] = tuple(backend.get_stop_token_ids())
        self._backend = backend
        self._tokenizer = tokenizer
        self._stop = frozenset(self.stop_token_ids)

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
            TokenizerNotFoundError: there is no readable tokenizer.
            UnknownRendererError: the name is unknown, or `auto` cannot tell.
            RendererMismatchError: the tokenizer lacks the format's control tokens, or an option is wrong.
        """
        # Imported here: it takes a second, which no command without a renderer should pay.
        from renderers import create_renderer

        path = str(tokenizer_path)
        name = _resolve(path, renderer_name)
        config = _config(name, options or {})
        tokenizer = load_tokenizer(path, with_template=name == "default")
        try:
            backend = create_renderer(tokenizer, config)
        except (AssertionError, TypeError, ValueError) as error:
            raise RendererMismatchError(
                f"the tokenizer at {path!r} does not fit the chat format {name!r}: {error}",
                hint="Name the format that the model was trained with, as in renderer = 'qwen3'.",
            ) from error
        if name in _CONTROL_TOKENS_BY_ID and isinstance(tokenizer, FastTokenizer):
            tokenizer.take_control_tokens_literally(True)
        return cls(backend, tokenizer, name)

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, without any chat format."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included; bytes that are no valid UTF-8 become U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """The ids of a whole conversation, up to where the assistant's next turn begins.

        Raises:
            RenderError: the chat format has no place for these messages.
        """
        wire = [_to_wire(message) for message in messages]
        try:
            return self._render(wire, True, tools)
        except ValueError as error:
            roles = ", ".join(message.role for message in messages) or "none"
            raise RenderError(
                f"the chat format {self.name!r} cannot render these messages ({roles}): {error}",
                hint="Begin with a system or user message, and answer every tool call.",
            ) from error

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """The next prompt, made of the previous prompt, its output and new messages.

        Nothing that came before is rendered again: the result starts with `prompt_ids + completion_ids`.
        An output that was cut off is closed as context. None when the extension cannot be proven.
        """
        new = [_to_wire(message) for message in new_messages]
        if self.name == "default":
            return self._extend(prompt_ids, completion_ids, new, tools)
        before = [*prompt_ids, *completion_ids]
        rendered = self._backend.bridge_to_next_turn(
            list(prompt_ids), list(completion_ids), new, tools=list(tools) or None
        )
        if rendered is None:
            return None
        ids: list[int] = rendered.token_ids
        # A renderer may drop what was sampled after a stop token; what was sampled is never dropped here.
        return ids if ids[: len(before)] == before else None

    def parse(
        self,
        completion_ids: Sequence[int],
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[ToolSpec] = (),
        call_prefix: str = "call",
    ) -> ParsedTurn:
        """Read text, reasoning and tool calls from sampled ids. Raises on no ids whatever.

        The prompt tells whether it opened a block of reasoning already. Calls are numbered
        `{call_prefix}-{index}` where the chat format carries no ids of its own.
        """
        ids = list(completion_ids)
        closed = not self._stop.isdisjoint(ids)
        try:
            parsed = self._backend.parse_response(
                ids, tools=list(tools) or None, prompt_ids=list(prompt_ids) if prompt_ids else None
            )
        except (ValueError, RecursionError, TypeError, AttributeError, KeyError, IndexError):
            # The library reads what a policy wrote with json.loads, which raises more than a syntax error:
            # numbers of too many digits, brackets nested too deep, objects where a string belongs.
            raw = self.decode(ids)
            call = ToolCall(id=f"{call_prefix}-0", name=None, arguments=None, raw=raw, error="unparseable")
            return ParsedTurn(content="", reasoning=None, tool_calls=(call,), closed=closed)
        calls = tuple(_to_call(call, f"{call_prefix}-{i}") for i, call in enumerate(parsed.tool_calls))
        return ParsedTurn(parsed.content, parsed.reasoning_content, calls, closed)

    def _render(self, wire: list[dict[str, Any]], begin_turn: bool, tools: Sequence[ToolSpec]) -> list[int]:
        try:
            return list(
                self._backend.render_ids(wire, tools=list(tools) or None, add_generation_prompt=begin_turn)
            )
        except (KeyError, TypeError, AssertionError, TemplateError) as error:
            raise ValueError(str(error)) from error

    def _extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new: list[dict[str, Any]],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        """A bridge in a chat format that the library knows by its template alone."""
        if not new or any(message["role"] == "assistant" for message in new):
            return None

        def render(wire: list[dict[str, Any]], begin_turn: bool) -> list[int]:
            return self._render(wire, begin_turn, tools)

        return template_bridge.extend(render, self.stop_token_ids, prompt, completion, new)


def _resolve(path: str, name: str) -> str:
    """The name of a chat format that the library knows."""
    from renderers.base import MODEL_RENDERER_MAP
    from renderers.configs import _CONFIG_BY_NAME

    known = sorted(set(_CONFIG_BY_NAME) - {"auto"})
    if name in known:
        return name
    if name != "auto":
        raise UnknownRendererError(
            f"there is no renderer {name!r}", hint=f"Known ones: auto, {', '.join(known)}."
        )
    model_type = read_json(Path(path).expanduser() / "config.json").get("model_type")
    found = MODEL_RENDERER_MAP.get(path) or _BY_MODEL_TYPE.get(str(model_type))
    if found is None:
        seen = (
            f"its model type is {model_type!r}" if model_type else "it has no config.json with a model_type"
        )
        raise UnknownRendererError(
            f"the chat format of {path!r} cannot be told: {seen}",
            hint=f"Name it, as in renderer = 'qwen3'. Known ones: {', '.join(known)}.",
        )
    return found


def _config(name: str, options: Mapping[str, Any]) -> Any:
    """The library's settings of a chat format."""
    from renderers.configs import _CONFIG_BY_NAME

    defaults = {} if name == "default" else {"thinking_retention": "all"}
    try:
        return _CONFIG_BY_NAME[name](**{**defaults, **options})
    except ValueError as error:
        raise RendererMismatchError(
            f"the chat format {name!r} does not take these options: {error}",
            hint="Remove the options that it does not know.",
        ) from error


def _to_wire(message: Message) -> dict[str, Any]:
    """A message as the library takes it: the OpenAI chat format."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        wire["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        wire["name"] = message.name
    if message.tool_calls:
        wire["content"], wire["tool_calls"] = _split_calls(message)
    return wire


def _split_calls(message: Message) -> tuple[str, list[dict[str, Any]]]:
    """A message's text and its well-formed calls; malformed ones stay in the text as they were written."""
    broken = [call.raw for call in message.tool_calls if call.error]
    calls = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
        if not call.error
    ]
    return "\n".join(filter(None, [message.content, *broken])), calls


def _to_call(parsed: Any, default_id: str) -> ToolCall:
    """A parsed call, malformed unless it has a name and arguments that JSON can carry."""
    error = None if parsed.status == "ok" else str(parsed.status)
    arguments = parsed.arguments
    if error is None and not (isinstance(parsed.name, str) and parsed.name):
        error = "missing_name"
    if error is None:
        error = _argument_error(arguments)
    return ToolCall.model_construct(
        id=parsed.id or default_id,
        name=parsed.name if isinstance(parsed.name, str) and parsed.name else None,
        arguments=None if error else arguments,
        raw=parsed.raw,
        error=error,
    )


def _argument_error(arguments: Any) -> str | None:
    """Why arguments cannot be handed to a tool: no object, or a NaN, a lone surrogate, too deep a nesting."""
    if not isinstance(arguments, dict):
        return "arguments_not_an_object"
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return "arguments_not_json"
    return None

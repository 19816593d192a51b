"""Reads the messages of Anthropic's Messages: lists of blocks, of which one message may hold several results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rollout_service.gateway.contract import ClientMessage, ClientToolCall
from rollout_service.gateway.dialects.content import BETWEEN_PARTS, describe_tools, unsupported
from rollout_service.gateway.dialects.fields import Fields, dump_json, invalid, join_content
from rollout_service.gateway.dialects.parameters import Sorted
from rollout_service.tokens import ToolSpec

_MEDIA = {"image": "an image", "audio": "audio", "video": "a video"}
_MAX_REFERENCED = 4 * 1024 * 1024
"""The most characters that references to tools may stand for; a reference is short, and its tool may be long."""


class MessageReader:
    """Reads the messages of one request, whose tools are known by their names."""

    def __init__(self, tools: Mapping[str, ToolSpec], notes: Sorted) -> None:
        self._tools = tools
        self._notes = notes
        self._referenced = 0

    def read(self, fields: Fields) -> Iterator[ClientMessage]:
        """Yield the messages; each result of a tool is a message of its own, in the client's order."""
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
        texts: list[str] = []
        for block in message.objects("content"):
            if block.text("type") != "tool_result":
                text = self._text(block)
                texts += [] if text is None else [text]
                continue
            if texts:
                yield ClientMessage("user", BETWEEN_PARTS.join(texts))
                texts = []
            yield self._result(block)
        if texts:
            yield ClientMessage("user", BETWEEN_PARTS.join(texts))

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
        self._skip(block, form)
        return None

    def _reference(self, block: Fields) -> str:
        name = block.required_text("tool_name")
        tool = self._tools.get(name)
        text = describe_tools([tool]) if tool else name
        self._referenced += len(text)
        if self._referenced > _MAX_REFERENCED:
            invalid(block.path, f"is one of references to more than {_MAX_REFERENCED} characters of tools")
        return text

    def _document(self, block: Fields) -> str:
        source = block.object("source")
        if source is None or source.text("type") != "text":
            unsupported(block.path, "a file")
        return source.text("data") or ""

    def _skip(self, block: Fields, form: str) -> None:
        if form in _MEDIA:
            unsupported(block.path, _MEDIA[form])
        self._notes.ignore(f"messages[].content[type={form}]")


def _call(block: Fields) -> ClientToolCall:
    arguments = block.values.get("input")
    text = dump_json({} if arguments is None else arguments)
    return ClientToolCall(block.text("id") or None, block.required_text("name"), text)

"""Bridges for chat formats that are known only by their template.

A template cannot extend sampled ids; it can only write whole conversations as text. So it writes the conversation as it
was before the last turn, with that turn, and with the new messages after it. The text after the turn's closing token
may follow the sampled ids if and only if these texts prove that

- nothing before the turn has changed: no reasoning is removed, no count is raised;
- everything that the turn says is still there, including its reasoning;
- the new messages change nothing between the text of the turn and its closing token;
- the new messages are after the closing token, and nowhere else;
- the closing token is the one that the policy sampled, unless its turn was cut off.

Otherwise the caller begins a new segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Wire = dict[str, Any]
"""A message in the OpenAI chat format, escaped (see `tokenizer`)."""


@dataclass(frozen=True, slots=True)
class Template:
    write: Callable[[list[Wire], bool], str]
    """A function from messages, and whether to begin the assistant's turn, to text.

    Raises:
        ValueError: the template cannot write these messages.
    """
    encode: Callable[[str], list[int]]
    stops: Mapping[str, int]
    """The ids of the tokens that end a turn, by their text."""


@dataclass(frozen=True, slots=True)
class _BridgedTurn:
    said: str
    close: str
    after: str


def extend(
    template: Template,
    completion: Sequence[int],
    history: Sequence[Wire],
    new: Sequence[Wire],
) -> list[int] | None:
    """Return the ids of the new messages after the completion, or None if these cannot be proven.

    `history` ends with the turn that `completion` was parsed into.
    """
    if not new or not history or history[-1]["role"] != "assistant":
        return None
    stops = set(template.stops.values())
    if any(message["role"] == "assistant" for message in new) or any(t in stops for t in completion[:-1]):
        return None
    try:
        turn = _proven(template, [*history[:-1], _audible(history[-1])], list(new))
    except ValueError:
        return None
    if turn is None:
        return None
    close = template.stops[turn.close]
    first, *delta = template.encode(turn.close + turn.after)
    if first != close:
        return None
    if not completion or completion[-1] not in stops:  # cut off: the close is context
        return [close, *delta]
    return delta if completion[-1] == close else None


def _proven(template: Template, history: list[Wire], new: list[Wire]) -> _BridgedTurn | None:
    before = template.write(history[:-1], True)
    whole, other, alone = (
        _turn(template, before, template.write(messages, begin))
        for messages, begin in ((history + new, True), (history + _altered(new), True), (history, False))
    )
    if whole is None or other is None or alone is None:
        return None
    parts = _parts(history[-1])
    return (
        whole
        if all(part in whole.said for part in parts)
        and (whole.said, whole.close) == (other.said, other.close)
        and whole.after != other.after
        and _tail(whole.said, parts) == _tail(alone.said, parts)
        else None
    )


def _turn(template: Template, before: str, text: str) -> _BridgedTurn | None:
    """Return None if the text before the turn has changed or the turn has no close."""
    if not text.startswith(before):
        return None
    rest = text[len(before) :]
    found = [(rest.find(close), close) for close in template.stops if close in rest]
    if not found:
        return None
    index, close = min(found)
    return _BridgedTurn(rest[:index], close, rest[index + len(close) :])


def _parts(message: Wire) -> list[str]:
    """Strip the texts of a turn, since templates trim them."""
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    texts = [message.get("reasoning_content"), message["content"], *calls]
    return [text.strip() for text in texts if text and text.strip()]


def _tail(said: str, parts: list[str]) -> str:
    return said.rpartition(parts[-1])[2]


def _audible(message: Wire) -> Wire:
    """Replace an empty turn, which templates may leave out, by one of a period."""
    return message if _parts(message) else {**message, "content": "."}


def _altered(new: list[Wire]) -> list[Wire]:
    return [{**message, "content": f"Not {message['content']}"} for message in new]

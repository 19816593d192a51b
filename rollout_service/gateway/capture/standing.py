"""How an answer stands in a client's history, compared with what the client was sent."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from rollout_service.gateway.capture.answer import SentAnswer, SentCall
from rollout_service.gateway.capture.history import canonical
from rollout_service.gateway.contract import ClientMessage, ClientToolCall


class Standing(StrEnum):
    """The largest change of an answer in a client's history, from none on."""

    EXACT = "exact"
    BY_VALUE = "by_value"
    """The arguments are written in another way, such as with other white space."""
    TEXT_TRIMMED = "text_trimmed"
    REASONING_DROPPED = "reasoning_dropped"
    """The reasoning is left out or changed."""
    ARGUMENTS_REWRITTEN = "arguments_rewritten"
    """A call has another name, other arguments, or is missing."""
    TEXT_CHANGED = "text_changed"


def compare(sent: SentAnswer, message: ClientMessage) -> Standing:
    """Return how an answer stands in an assistant's message."""
    if message.text.strip() != sent.text.strip():
        return Standing.TEXT_CHANGED
    calls = _compare_calls(sent.calls, message.calls)
    if calls is Standing.ARGUMENTS_REWRITTEN:
        return calls
    if (message.reasoning or "").strip() != sent.reasoning.strip():
        return Standing.REASONING_DROPPED
    return Standing.TEXT_TRIMMED if message.text != sent.text else calls


def same_calls(sent: SentAnswer, message: ClientMessage) -> bool:
    """Return whether a message has the calls of an answer, by value and in order; its client may leave out ids."""
    return _compare_calls(sent.calls, message.calls) is not Standing.ARGUMENTS_REWRITTEN


def _compare_calls(sent: Sequence[SentCall], echoed: Sequence[ClientToolCall]) -> Standing:
    if [call.name for call in sent] != [call.name for call in echoed]:
        return Standing.ARGUMENTS_REWRITTEN
    if any(other.id not in (None, one.id) for one, other in zip(sent, echoed, strict=True)):
        return Standing.ARGUMENTS_REWRITTEN
    pairs = [(one.arguments, other.arguments) for one, other in zip(sent, echoed, strict=True)]
    if all(one == other for one, other in pairs):
        return Standing.EXACT
    same = all(one == other or canonical(one) == canonical(other) for one, other in pairs)
    return Standing.BY_VALUE if same else Standing.ARGUMENTS_REWRITTEN

"""Bridges for chat formats that are known by their template alone.

A template cannot extend sampled ids; it can only render whole conversations. So new messages are rendered
after two different made-up conversations. When the prompt before the assistant's turn stays as it was in both, and
the ids from the turn's stop token on are the same, they do not depend on what came before, and may follow the
sampled ids as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Render = Callable[[list[dict[str, Any]], bool], list[int]]
"""Messages, and whether to begin the assistant's turn, to ids. Raises ValueError where it cannot."""

_CALL = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"x": 1}}}


def extend(
    render: Render,
    stop_ids: Sequence[int],
    prompt: Sequence[int],
    completion: Sequence[int],
    new_messages: list[dict[str, Any]],
) -> list[int] | None:
    """The prompt, the completion, and the ids of the new messages; None when they cannot be proven."""
    if not stop_ids or any(token in stop_ids for token in completion[:-1]):
        return None
    deltas = [_delta(render, stop_ids, history, new_messages) for history in _histories(new_messages)]
    delta = deltas[0]
    if delta is None or any(other != delta for other in deltas):
        return None
    close, rest = delta[0], delta[1:]
    if completion and completion[-1] in stop_ids:
        return [*prompt, *completion, *rest]
    return [*prompt, *completion, close, *rest]


def _histories(new_messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Two conversations that new messages may follow, as unlike as the template allows."""
    answers: list[dict[str, Any]] = [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "Longer words.\n"},
    ]
    if new_messages and new_messages[0]["role"] == "tool":
        calls = [_CALL] * sum(message["role"] == "tool" for message in new_messages)
        answers = [{**answer, "tool_calls": calls} for answer in answers]
    system = {"role": "system", "content": "s"}
    return [
        [{"role": "user", "content": "u"}, answers[0]],
        [system, {"role": "user", "content": "Other words."}, answers[1]],
    ]


def _delta(
    render: Render, stop_ids: Sequence[int], history: list[dict[str, Any]], new: list[dict[str, Any]]
) -> list[int] | None:
    """What follows the history's last turn, from its stop token on; None when earlier ids would change."""
    try:
        opening, whole = render(history[:-1], True), render(history + new, True)
    except ValueError:
        return None
    if whole[: len(opening)] != opening:
        return None
    close = next((i for i in range(len(opening), len(whole)) if whole[i] in stop_ids), None)
    return None if close is None else whole[close:]

"""What followed an answer: the client's messages since it, as one text for a judge.

Guarantees: every message of a user or a tool is in the text, whole, with its role and the name of its tool, in the
order in which it came. Messages from the assistant or the system say nothing about the answer, and are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollout_service.gateway.contract import ClientMessage
from rollout_service.live.contract import NextStateRecord

_ERROR_TEXT: Final = re.compile(
    r"\s*(?:\[?error\]?\s*[:!]|<(?:tool_use_)?error>|traceback \(most recent call last\))", re.IGNORECASE
)
_FAILED: Final = frozenset({"error", "failed", "failure"})
_READ_CHARS: Final = 1_000_000
"""A longer result is not read as JSON, since that would hold up the event loop."""


def next_state(
    messages: Sequence[ClientMessage], arrived_at: float, calls: Mapping[str, str] | None = None
) -> NextStateRecord | None:
    """Return what the messages since an answer say of it, or None if no user and no tool says anything.

    `calls` are the names of the answer's tool calls by the ids that the client knows, for results that come without the
    tool's name.
    """
    said = [message for message in messages if message.role in ("user", "tool")]
    if not said:
        return None
    roles = {message.role for message in said}
    later = {call.id: call.name for message in messages for call in message.calls if call.id is not None}
    names = {**(calls or {}), **later}
    return NextStateRecord(
        role="mixed" if len(roles) > 1 else "tool" if "tool" in roles else "user",
        text="\n\n".join(_titled(message, names) for message in said),
        is_error=any(
            message.role == "tool" and (message.is_error or says_error(message.text)) for message in said
        ),
        arrived_at=arrived_at,
    )


def says_error(result: str) -> bool:
    """Return whether a tool's result says that the call failed.

    Only Anthropic's API has a field for that. In the others, the text begins with it, or is JSON with such a field.
    """
    if _ERROR_TEXT.match(result):
        return True
    text = result.strip()
    if not text.startswith("{") or len(text) > _READ_CHARS:
        return False
    try:
        read: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        return False
    status = read.get("status")
    return (
        any(read.get(name) not in (None, False, "", 0, [], {}) for name in ("error", "is_error", "isError"))
        or (isinstance(status, str) and status.casefold() in _FAILED)
        or read.get("success") is False
    )


def _titled(message: ClientMessage, names: Mapping[str, str]) -> str:
    if message.role != "tool":
        return f"[{message.role}]\n{message.text}"
    name = message.tool_name or names.get(message.call_id or "", "")
    return f"[tool {name}]\n{message.text}" if name else f"[tool]\n{message.text}"

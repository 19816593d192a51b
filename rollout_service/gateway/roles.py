"""How a client's system and developer messages become what chat formats allow: one system message, at the start.

Guarantee: the mapping of a message depends only on it and on those before it, so a longer history maps to a longer
list with the same beginning, unless it goes on with a system message where the first one has not ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollout_service.gateway.contract import ClientMessage

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

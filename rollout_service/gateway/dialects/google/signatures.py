"""Thought signatures: what clients send back unread. Ours hold the key of the turn, and the id of the call."""

from __future__ import annotations

import base64
import binascii


def sign(turn_key: str, call_id: str = "") -> str:
    """Return a signature; Google's clients require base64."""
    return base64.b64encode(f"{turn_key}.{call_id}".encode()).decode()


def read_signature(signature: str) -> tuple[str, str | None]:
    """Return the key of the turn and the id of the call; a signature of another service is a key of no turn."""
    try:
        text = base64.b64decode(signature, altchars=b"-_" if set("-_") & set(signature) else None).decode(
            "ascii"
        )
    except (binascii.Error, ValueError):
        return signature, None
    turn_key, _, call_id = text.partition(".")
    return turn_key, call_id or None

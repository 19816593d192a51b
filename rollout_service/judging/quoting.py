"""Puts texts of unknown origin into a prompt, between markers that they cannot contain.

Guarantee: the closing marker of a quoted text does not occur in it, and nobody can write a text that has its own
marker, since the marker depends on the whole text. Equal texts are quoted equally.
"""

from __future__ import annotations

from hashlib import sha256

CUT = "\n[... {} characters are left out here ...]\n"


def quote(name: str, text: str, max_chars: int) -> str:
    """Return the text between markers with its name; a longer one is cut in the middle."""
    text = cut_middle(text, max_chars)
    digest = sha256(text.encode(errors="replace")).hexdigest()
    while digest[:16] in text:  # practically never
        digest = sha256(digest.encode()).hexdigest()
    tag = f"{name}-{digest[:16]}"
    return f"<{tag}>\n{text}\n</{tag}>"


def cut_middle(text: str, max_chars: int) -> str:
    """Return a text of at most about `max_chars` characters, with a note where it was cut."""
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    tail = max_chars - head
    return text[:head] + CUT.format(len(text) - head - tail) + text[len(text) - tail :]

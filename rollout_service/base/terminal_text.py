"""Escaping of untrusted text before it is shown on a terminal.

Foreign text may hold control sequences that a terminal obeys: they set its title, write its clipboard, clear it, or
reverse the order of the text that follows. The returned text has none. Each is shown in Python's notation, such as
`\\x1b`.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1 without tab and line feed
    "\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # invisible, or reversing the order
    "\ud800-\udfff"  # lone surrogates, which no encoding has
    "\U000e0000-\U000e007f"  # tags: invisible text
    "]"
)


def escape_controls(text: str) -> str:
    """Escape everything that a terminal would obey or hide, except line feeds and tabs."""
    return _UNSAFE.sub(_escaped, text) if _UNSAFE.search(text) else text


def escape_controls_in_json(document: str) -> str:
    """Escape as `\\uXXXX`; such characters occur only in a document's strings."""
    return _UNSAFE.sub(_json_escaped, document) if _UNSAFE.search(document) else document


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _json_escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))

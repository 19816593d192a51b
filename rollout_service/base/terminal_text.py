"""Escaping of untrusted text before it is shown on a terminal.

A policy, a program in a sandbox, an engine, or a server may write control sequences that a terminal obeys: escape
sequences that set its title, write its clipboard, or clear it; C1 controls that do the same in one character; and marks
that reverse the order of the text that follows. Guarantee: the text that these functions return has none. Each is shown
in Python's notation, such as `\\x1b`, so the reader sees that it was there.
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
    """Escape everything in a text that a terminal would obey or hide, except line feeds and tabs."""
    return _UNSAFE.sub(_escaped, text) if _UNSAFE.search(text) else text


def escape_controls_in_json(document: str) -> str:
    """Write such characters in a JSON document as `\\uXXXX`; they occur only in its strings."""
    return _UNSAFE.sub(_json_escaped, document) if _UNSAFE.search(document) else document


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _json_escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))

"""Text for the policy: long results are cut in the middle, where they matter least."""

from __future__ import annotations

from collections.abc import Sequence

NO_OUTPUT = "[no output]"
MIN_LIMIT = 64
"""The smallest limit that leaves room for text next to the note."""


def cut_middle(text: str, limit: int) -> str:
    """Return the text, or its beginning and end around a note that says how much is missing.

    The result is never longer than `limit` characters, which must be at least `MIN_LIMIT`.
    """
    if limit < MIN_LIMIT:
        raise ValueError(f"a limit of {limit} characters leaves no room for text; use {MIN_LIMIT} or more")
    if len(text) <= limit:
        return text
    # The note's length depends on the number in it, so its greatest length is reserved.
    room = limit - len(_note(len(text)))
    head = (room + 1) // 2
    tail = room - head
    return text[:head] + _note(len(text) - room) + (text[-tail:] if tail else "")


def with_notes(output: str, notes: Sequence[str], limit: int) -> str:
    """Return the output and the notes; the output is cut if necessary, the notes never."""
    tail = "\n".join(notes)
    output = output.removesuffix("\n")
    if not output:
        return tail or NO_OUTPUT
    room = limit - len(tail) - 1 if tail else limit
    output = cut_middle(output, max(room, MIN_LIMIT))
    return f"{output}\n{tail}" if tail else output


def _note(missing: int) -> str:
    return f"\n[... {missing} characters cut ...]\n"

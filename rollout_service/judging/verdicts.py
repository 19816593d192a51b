r"""Reads the verdict in a judge's answer.

Guarantees: the verdict is one of the given labels, and the judge marked it: with `VERDICT:`, with `\boxed{}`, or by
saying nothing else. The last mark counts, even if it has no label that is known. Reasoning is never a verdict, nor is
an answer whose reasoning does not end. The time is linear in the length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_MARK = re.compile(
    r"\bVERDICT\b[*_` \t]*[:=][*_`\s]*|\\boxed\{(?:\\(?:text|mathrm|textbf)\{)?\s*", re.IGNORECASE
)
_MARKED = re.compile(r"[^\n}]*")
_WRAPPING = " \t\r\n.,;:!*_`'\"()[]{}"


def read_verdict(answer: str, labels: Iterable[str]) -> str | None:
    """Return the label that the answer chooses, or None."""
    _, closed, after = answer.rpartition("</think>")
    if not closed and "<think>" in answer:
        return None
    marks = list(_MARK.finditer(after))
    marked = _MARKED.match(after, marks[-1].end()) if marks else None
    chosen = normalize(marked[0] if marked else after)
    return next((label for label in labels if normalize(label) == chosen), None)


def normalize(label: str) -> str:
    """Return a label in the form in which labels are compared."""
    return " ".join(label.strip(_WRAPPING).casefold().split())

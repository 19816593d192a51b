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
_BOX = re.compile(r"\\boxed\{(?:\\(?:text|mathrm|textbf)\{)?([^\n{}]*)(\}?)")
_MARKED = re.compile(r"[^\n}]*")
_WRAPPING = " \t\r\n.,;:!*_`'\"()[]{}"


def read_verdict(answer: str, labels: Iterable[str]) -> str | None:
    """Return the label that the answer chooses, or None."""
    if (after := without_reasoning(answer)) is None:
        return None
    marks = list(_MARK.finditer(after))
    marked = _MARKED.match(after, marks[-1].end()) if marks else None
    chosen = normalize(marked[0] if marked else after)
    return next((label for label in labels if normalize(label) == chosen), None)


def read_box(answer: str, labels: Iterable[str]) -> str | None:
    """Return the label in the last box of the answer, or None if it has no box, or another one."""
    if (after := without_reasoning(answer)) is None:
        return None
    boxes = _BOX.findall(after)
    if not boxes:
        return None
    content, closed = boxes[-1]
    chosen = normalize(content)
    if not closed:
        return None
    return next((label for label in labels if normalize(label) == chosen or _are_equal(label, chosen)), None)


def without_reasoning(answer: str) -> str | None:
    """Return what stands after the reasoning, or None if the reasoning does not end."""
    _, closed, after = answer.rpartition("</think>")
    return None if not closed and "<think>" in answer else after


def _are_equal(label: str, chosen: str) -> bool:
    try:
        return float(label) == float(chosen.replace("\N{MINUS SIGN}", "-"))
    except ValueError:
        return False


def normalize(label: str) -> str:
    """Return a label in the form in which labels are compared."""
    return " ".join(label.strip(_WRAPPING).casefold().split())

r"""The boxed answer in a text, as in `so it is \boxed{42}`."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str | None) -> str | None:
    r"""Return the content of the `\boxed{...}` that is closed last, or None.

    Braces inside it are matched, `\{` and `\}` are text, and the time is linear in the length.
    """
    found: str | None = None
    open_braces: list[int | None] = []  # where the content of a box begins, None for any other brace
    for token in _TOKEN.finditer(text or ""):
        match token.group():
            case "{":
                open_braces.append(None)
            case "}":
                begin = open_braces.pop() if open_braces else None
                if begin is not None:
                    found = (text or "")[begin : token.start()].strip()
            case r"\boxed{":
                open_braces.append(token.end())
    return found

"""The tables of parameters as a part of `docs/reference/gateway.md`, so that the page agrees with the code.

    PYTHONPATH=packaging python -m docs_site.parameters docs/reference/gateway.md

writes that part of the page again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rollout_service.gateway.contract import Dialect
from rollout_service.gateway.dialects import CODECS
from rollout_service.gateway.dialects.fields import Parameter

BEGIN, END = "<!-- generated: parameters -->", "<!-- end of what is generated -->"
_TITLES = {
    Dialect.CHAT: "Chat Completions",
    Dialect.RESPONSES: "Responses",
    Dialect.ANTHROPIC: "Messages",
    Dialect.GOOGLE: "generateContent",
}


def parameter_tables() -> str:
    """Return the tables of all dialects in Markdown."""
    sections = []
    for dialect, codec in CODECS.items():
        rows = "\n".join(map(_row, codec.parameters.rows))
        head = f"### {_TITLES[dialect]}\n| parameter | | |\n|---|---|---|\n"
        sections.append(head + rows + "\n")
    return "\n".join(sections)


def replace_tables(page: str) -> str:
    """Return a page with its tables written again.

    Raises:
        ValueError: The page has no place for them.
    """
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{parameter_tables()}{END}{after}"


def _row(row: Parameter) -> str:
    return f"| `{row.path}` | {row.treatment} | {row.note} |"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(replace_tables(target.read_text()))

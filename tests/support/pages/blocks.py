"""The shell blocks of the pages, in their order.

A block is run by a test unless the line before it is a comment `<!-- not run: REASON -->`, so a new block is run. A
comment `<!-- run after: COMMANDS -->` has what its reader has done already, in the same terminal.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(
    r"(?:^<!-- (?P<how>not run|run after): (?P<said>[^\n]+) -->\n)?^```(?:bash|sh)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class ShellBlock:
    """A block of shell as a reader copies it."""

    page: str
    line: int
    """The line of the page at which its text begins."""
    text: str
    not_run: str = ""
    """Why no test runs it, or nothing."""
    after: str = ""
    """What is run before it."""


def shell_blocks(page: str) -> list[ShellBlock]:
    """Return the shell blocks of a page, which is named by its path from the root of the repository."""
    text = (ROOT / page).read_text()
    return [
        ShellBlock(
            page,
            text.count("\n", 0, found.start("text")) + 1,
            found["text"],
            not_run=found["said"] if found["how"] == "not run" else "",
            after=found["said"] if found["how"] == "run after" else "",
        )
        for found in BLOCK.finditer(text)
    ]

"""The consoles that commands print to.

Guarantees: whatever is printed is safe for a terminal, whoever wrote it, and never read as markup; through a pipe
nothing is wrapped, cut or padded, so that paths and commands come out whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from rollout_service.terminal_text import escape_controls

PIPE_WIDTH = 1_000_000


class SafeConsole(Console):
    """A rich console that shows text and never obeys it."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)
        if not (self.is_terminal and self.file.isatty()):  # FORCE_COLOR makes a pipe count as a terminal
            self.width = PIPE_WIDTH

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render, and escape what is not rich's own control sequence."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does; through a pipe without the padding at the ends of lines."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        lines = captured.get().split("\n")
        self.file.write("\n".join(line.rstrip(" ") for line in lines))
        self.file.flush()


class Heading:
    """A line that begins a part of the output, drawn across a terminal."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if console.is_terminal and console.width < PIPE_WIDTH:
            yield Rule(Text(self.text), align="left")
        else:
            yield Text(f"--- {self.text}".rstrip())


class SafeTable(Table):
    """A table whose cells are measured as they are shown."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row, with what a terminal would obey escaped."""
        super().add_row(
            *(escape_controls(cell) if isinstance(cell, str) else cell for cell in cells), **options
        )


def table(*columns: str | Column, title: str | None = None, header: bool = True) -> Table:
    """Return an empty table without a frame; where a terminal is narrow its cells are folded and never cut."""
    whole = [Column(one, overflow="fold") if isinstance(one, str) else one for one in columns]
    return SafeTable(
        *whole,
        title=title,
        title_justify="left",
        show_header=header,
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )


def id_column(name: str) -> Column:
    """Return a column of what commands take, such as an id: it is never broken."""
    return Column(name, no_wrap=True, overflow="ignore")

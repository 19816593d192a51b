"""The consoles and tables that commands print with.

Everything that is printed is safe for a terminal, whoever wrote it, and is never read as markup. Through a pipe,
nothing is wrapped, cut, or padded, so paths and commands come out whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from rollout_service.base.terminal_text import escape_controls

PIPE_WIDTH = 1_000_000
HANG_STYLES = {"stuck": "bold red", "idle": "yellow", "slow": "yellow", "held": "cyan"}


class SafeConsole(Console):
    def __init__(self, *, stderr: bool = False, color: bool = True) -> None:
        plain = not color or bool(os.environ.get("NO_COLOR"))
        super().__init__(
            stderr=stderr, highlight=False, markup=False, emoji=False, color_system=None if plain else "auto"
        )
        self.is_plain = plain or self.color_system is None
        """Whether meaning has to be written out, because there are no styles."""
        if not (self.is_terminal and self.file.isatty()):  # FORCE_COLOR makes a pipe count as a terminal
            self.width = PIPE_WIDTH

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, but without padding at line ends through a pipe."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        lines = captured.get().split("\n")
        self.file.write("\n".join(line.rstrip(" ") for line in lines))
        self.file.flush()


class Heading:
    """A heading in the output; on a terminal, a rule across its width."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if console.is_terminal and console.width < PIPE_WIDTH:
            yield Rule(Text(self.text), align="left")
        else:
            yield Text(f"--- {self.text}".rstrip())


class SafeTable(Table):
    """A table whose cells are escaped before they are measured."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(escape_controls(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def table(*columns: str | Column, title: str | None = None, header: bool = True) -> Table:
    """Return an empty table without a frame; on a narrow terminal its cells wrap and are never cut."""
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
    """Return a column for values that commands take, such as ids, which never wraps."""
    return Column(name, no_wrap=True, overflow="ignore")

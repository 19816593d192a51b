"""Shows progress: a live bar on a terminal, and a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from api_schemas.rollouts import Rollout, RolloutState

LINE_SECONDS = 3.0


@dataclass(slots=True)
class Tally:
    """Counts of how rollouts ended, and how fast."""

    total: int
    ended: Counter[RolloutState] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add(self, rollout: Rollout) -> None:
        """Count a rollout that has ended."""
        self.ended[rollout.state] += 1
        if rollout.reward is not None:
            self.rewards.append(rollout.reward)

    @property
    def count(self) -> int:
        """The number of rollouts that have ended."""
        return self.ended.total()

    def __str__(self) -> str:
        parts = [f"{count} {state}" for state, count in sorted(self.ended.items())]
        if self.rewards:
            parts.append(f"mean reward {sum(self.rewards) / len(self.rewards):.2f}")
        if seconds := time.monotonic() - self.started:
            parts.append(f"{self.count / seconds:.1f}/s")
        return ", ".join(parts)


class ProgressView:
    """Shows a tally while it grows."""

    def __init__(self, console: Console, tally: Tally) -> None:
        self._console = console
        self._tally = tally
        self._said = time.monotonic()
        self._note = ""
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=tally.total)

    def update(self, note: str | None = None) -> None:
        """Show the current counts; `note` begins the line until it is replaced."""
        self._note = self._note if note is None else note
        text = ", ".join(filter(None, [self._note, str(self._tally)]))
        self._bar.update(self._task, completed=self._tally.count, total=self._tally.total, description=text)
        if not self._console.is_terminal and time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            self._console.print(f"{self._tally.count}/{self._tally.total}: {text}")

    def say(self, text: str) -> None:
        """Print a line, above the bar on a terminal."""
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def shown(self) -> Iterator[ProgressView]:
        """Show the bar during the block, and a last line at its end."""
        with self._bar:
            self.update()
            yield self
        if not self._console.is_terminal:
            self._console.print(f"{self._tally.count}/{self._tally.total}: {self._tally}")

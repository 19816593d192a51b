"""Shows progress: a live bar on a terminal, and a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
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
from rollout_service.cli.common import joined_counts

if TYPE_CHECKING:
    from rollout_client.client import RolloutClient

LINE_SECONDS = 3.0


@dataclass(slots=True)
class Tally:
    total: int
    ended: Counter[RolloutState] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add(self, rollout: Rollout) -> None:
        self.ended[rollout.state] += 1
        if rollout.reward is not None:
            self.rewards.append(rollout.reward)

    @property
    def count(self) -> int:
        return self.ended.total()

    @property
    def unsuccessful(self) -> int:
        return self.count - self.ended[RolloutState.COMPLETED]

    def __str__(self) -> str:
        parts = [joined_counts(self.ended)] if self.ended else []
        if self.rewards:
            parts.append(f"mean reward {sum(self.rewards) / len(self.rewards):.2f}")
        if seconds := time.monotonic() - self.started:
            parts.append(f"{self.count / seconds:.1f}/s")
        return ", ".join(parts)


class ProgressView:
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
        with self._bar:
            self.update()
            yield self
        if not self._console.is_terminal:
            self._console.print(f"{self._tally.count}/{self._tally.total}: {self._tally}")


CHECK_SECONDS = 3.0
AGAIN_SECONDS = 30.0


@asynccontextmanager
async def explain_waiting(client: RolloutClient, view: ProgressView, pools: Mapping[str, int]) -> AsyncIterator[None]:
    """During the block, say on stderr why the server takes no work, whenever it does not.

    `pools` has the first line for each pool; it may grow meanwhile.
    """
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_explain, client, view, pools)
            yield
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None  # the block's own, as if there were no group
        raise


async def _explain(client: RolloutClient, view: ProgressView, pools: Mapping[str, int]) -> None:
    said, said_at = "", 0.0
    while True:
        reason = await _reason(client, pools)
        if reason and (reason != said or time.monotonic() - said_at >= AGAIN_SECONDS):
            view.say(f"Waiting: {reason}")
            said_at = time.monotonic()
        elif said and not reason:
            view.say("The server is ready again.")
        said = reason
        await anyio.sleep(CHECK_SECONDS)


async def _reason(client: RolloutClient, pools: Mapping[str, int]) -> str:
    """Return why the server takes no work; empty if it does or cannot be asked."""
    from rollout_client.client import ClientError, UnreachableError

    try:
        return " ".join((await client.readiness()).reasons or await _lacking(client, pools))
    except UnreachableError as error:
        return str(error)
    except ClientError:  # the requests get the same error, and report it
        return ""


async def _lacking(client: RolloutClient, pools: Mapping[str, int]) -> list[str]:
    served = sorted({view.pool for view in await client.backends()})
    return [
        f"line {line} is for the pool {pool!r}, which has no backend; the server's pools are {', '.join(served)}."
        for pool, line in pools.items()
        if pool not in served
    ]

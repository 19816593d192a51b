"""The output of `watch` without a terminal: counts from the list of rollouts, speed from the event stream."""

from __future__ import annotations

import time
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field

import anyio
from rich.console import Console

from api_schemas.events import Event
from api_schemas.inference import BackendView
from api_schemas.nodes import NodeView
from api_schemas.rollouts import RolloutState
from rollout_client.client import RolloutClient
from rollout_service.cli import common

LOOK_SECONDS = 1.0
LINE_SECONDS = 3.0
RATE_SECONDS = 30.0
STATE_EVENT = "rollout.state"


@dataclass(slots=True)
class ServerView:
    """The current state of a server, as far as it is known."""

    counts: dict[RolloutState, int] = field(default_factory=dict)
    backends: list[BackendView] = field(default_factory=list)
    nodes: list[NodeView] = field(default_factory=list)
    ended: deque[float] = field(default_factory=deque)
    """The times at which rollouts ended, within the last `RATE_SECONDS`."""
    began: float = field(default_factory=time.monotonic)

    def add(self, event: Event) -> None:
        if event.kind == STATE_EVENT and RolloutState(str(event.data["state"])).terminal:
            self.ended.append(time.monotonic())

    def rate(self) -> float:
        """Return the rollouts ended per second, over the last `RATE_SECONDS` or since the watch began."""
        now = time.monotonic()
        while self.ended and self.ended[0] < now - RATE_SECONDS:
            self.ended.popleft()
        return len(self.ended) / max(LOOK_SECONDS, min(RATE_SECONDS, now - self.began))

    def line(self) -> str:
        counts = [f"{self.counts[state]} {state}" for state in RolloutState if self.counts.get(state)]
        sandboxes = common.count(sum(node.live for node in self.nodes), "sandbox", "sandboxes")
        engines = common.count(len(self.backends), "engine")
        parts = [*counts, sandboxes, engines, f"{self.rate():.1f} rollouts/s"]
        holds = [hold.reason for node in self.nodes if node.waiting for hold in node.holds]
        return ", ".join(parts) + (f"; sandboxes wait: {'; '.join(holds)}" if holds else "")


def format_event(event: Event) -> str:
    data = ", ".join(f"{name} {value}" for name, value in event.data.items() if value is not None)
    return f"{event.time:%H:%M:%S} {event.kind} {event.subject} {data}"


async def watch(client: RolloutClient) -> None:
    """Show a server's state until cancelled, or, on a terminal, until `q` is pressed."""
    console = common.out()
    if console.is_terminal:
        from rollout_service.cli.watch.screen import watch_screen

        await watch_screen(client, await client.overview(), console)
        return
    view = ServerView()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_follow, client, view)
        tasks.start_soon(_print_lines, view, console)
        await _look(client, view)


async def _follow(client: RolloutClient, view: ServerView) -> None:
    async with aclosing(client.events()) as events:
        async for event in events:
            view.add(event)


async def _look(client: RolloutClient, view: ServerView) -> None:
    while True:
        view.counts = (await client.page(limit=1)).counts
        view.backends = await client.backends()
        view.nodes = await client.nodes()
        await anyio.sleep(LOOK_SECONDS)


async def _print_lines(view: ServerView, console: Console) -> None:
    while True:
        await anyio.sleep(LINE_SECONDS)
        console.print(view.line(), soft_wrap=True)

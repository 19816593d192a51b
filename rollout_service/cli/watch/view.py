"""Draws the live view of `watch`: counts from the list of rollouts, speed and recent events from the event stream."""

from __future__ import annotations

import time
from collections import deque
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import anyio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from api_schemas.events import Event
from api_schemas.inference import BackendView
from api_schemas.nodes import NodeView
from api_schemas.rollouts import RolloutState
from rollout_client.client import NotFoundError, RolloutClient
from rollout_service.cli import common
from rollout_service.cli.backends import render_backends
from rollout_service.cli.console import table

LOOK_SECONDS = 1.0
LINE_SECONDS = 3.0
RATE_SECONDS = 30.0
SHOWN_EVENTS = 10
STATE_EVENT = "rollout.state"


@dataclass(slots=True)
class ServerView:
    """The current state of a server, as far as it is known."""

    counts: dict[RolloutState, int] = field(default_factory=dict)
    backends: list[BackendView] = field(default_factory=list)
    nodes: list[NodeView] = field(default_factory=list)
    recent_events: deque[Event] = field(default_factory=lambda: deque(maxlen=SHOWN_EVENTS))
    ended: deque[float] = field(default_factory=deque)
    """The times at which rollouts ended, within the last `RATE_SECONDS`."""
    began: float = field(default_factory=time.monotonic)

    def add(self, event: Event) -> None:
        """Add an event."""
        self.recent_events.append(event)
        if event.kind == STATE_EVENT and RolloutState(str(event.data["state"])).terminal:
            self.ended.append(time.monotonic())

    def rate(self) -> float:
        """Return the rollouts ended per second, over the last `RATE_SECONDS` or since the watch began."""
        now = time.monotonic()
        while self.ended and self.ended[0] < now - RATE_SECONDS:
            self.ended.popleft()
        return len(self.ended) / max(LOOK_SECONDS, min(RATE_SECONDS, now - self.began))

    def line(self) -> str:
        """Return the state as one line."""
        counts = [f"{self.counts[state]} {state}" for state in RolloutState if self.counts.get(state)]
        sandboxes = common.count(sum(node.live for node in self.nodes), "sandbox", "sandboxes")
        engines = common.count(len(self.backends), "engine")
        parts = [*counts, sandboxes, engines, f"{self.rate():.1f} rollouts/s"]
        holds = [hold.reason for node in self.nodes if node.waiting for hold in node.holds]
        return ", ".join(parts) + (f"; sandboxes wait: {'; '.join(holds)}" if holds else "")

    def __rich__(self) -> RenderableType:
        states = table(*(str(state) for state in RolloutState), "rollouts/s")
        numbers = [str(self.counts.get(state, 0)) for state in RolloutState]
        states.add_row(*numbers, f"{self.rate():.1f}")
        recent_events = [Text(format_event(event), style="dim", no_wrap=True) for event in self.recent_events]
        parts = (states, render_backends(self.backends), render_nodes(self.nodes), Group(*recent_events))
        return Group(*(line for part in parts for line in (part, "")))


def format_event(event: Event) -> str:
    """Return an event as one line."""
    data = ", ".join(f"{name} {value}" for name, value in event.data.items() if value is not None)
    return f"{event.time:%H:%M:%S} {event.kind} {event.subject} {data}"


def render_nodes(nodes: list[NodeView]) -> RenderableType:
    """Return a table of hosts and their sandboxes, followed by what holds new sandboxes back."""
    names = ("provider", "sandboxes", "in use", "target", "ceiling", "warm", "waiting")
    rows = table("node", *names)
    for node in nodes:
        numbers = (node.live, node.in_use, node.target, node.ceiling, node.warm, node.waiting)
        rows.add_row(node.node, node.provider, *map(str, numbers))
    holds = (f"{node.node} holds back: {hold.reason}" for node in nodes for hold in node.holds)
    return Group(rows, *(Text(hold, style="yellow") for hold in holds))


async def watch(client: RolloutClient) -> None:
    """Show a server's state until cancelled, or, on a terminal, until `q` is pressed."""
    view, console = ServerView(), common.out()
    if console.is_terminal:
        from rollout_service.cli.watch.screen import watch_screen

        with suppress(NotFoundError):  # an older server has no overview
            await watch_screen(client, await client.overview(), console)
            return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_follow, client, view)
        if console.is_terminal:
            with Live(view, console=console, refresh_per_second=4):
                await _look(client, view)
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

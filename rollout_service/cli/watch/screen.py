"""The full-screen view of `watch`: the service at a glance, once a second, and the latest events.

Problems come first, and the end is cut if it does not fit. The terminal is restored however the view is left. While a
server is away, the view says so and keeps the last known state.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

import anyio
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from api_schemas.events import Event
from api_schemas.views.overview import Overview
from rollout_client.client import RolloutClient
from rollout_service.cli.console import SafeConsole
from rollout_service.cli.watch import sections
from rollout_service.cli.watch.view import format_event

LOOK_SECONDS = 1.0
AWAY_SECONDS = 3.0
"""A server that takes longer counts as away, while the client tries again."""
FRAMES_PER_SECOND = 4.0
KEPT_EVENTS = 200
FOOTER = "q quit   p pause the view   ? help"
HELP = """
q       quit; Ctrl-C does, too
p       pause the view, not the service; again to go on
?       show or leave this help

findings    what is stuck, slow or held back, the worst first: `GET /v1/hangs` has the stacks
pipeline    rollouts that work in each stage, of its workers, and wait, of its places; what those that work wait for
engines     requests under way; the share of prompt tokens that the prefix cache had; rates of the last minute
nodes       sandboxes in use, of those that the host can bear now; a hold says why it takes no more
runs        groups under way, ready and trained on; how many versions the oldest token of the newest group is behind
"""


@dataclass(slots=True)
class Screen:
    overview: Overview
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    shows_help: bool = False
    frozen: RenderableType | None = None
    seen: float = field(default_factory=time.monotonic)
    quit: anyio.Event = field(default_factory=anyio.Event)

    def press(self, key: str) -> None:
        if key in ("q", "Q"):
            self.quit.set()
        elif key in ("p", "P", " "):
            self.frozen = None if self.frozen is not None else self._whole()
        elif key in ("?", "h"):
            self.shows_help = not self.shows_help

    def update(self, overview: Overview) -> None:
        self.overview, self.seen = overview, time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        body = Text(HELP) if self.shows_help else self.frozen or self._whole()
        free = options.update(height=None)
        lines = console.render_lines(body, free, pad=False)[: max(0, height - 1)]
        for line in lines:
            yield from line
            yield Segment.line()
        for _ in range(height - 1 - len(lines)):
            yield Segment.line()
        yield from console.render_lines(self._footer(), free, pad=False)[0]

    def _whole(self) -> RenderableType:
        recent = [
            Text(format_event(event), style="dim", no_wrap=True, overflow="crop") for event in reversed(self.events)
        ]
        parts = [part for part in sections.all_of(self.overview) if part is not None]
        spaced = [line for part in parts for line in (part, Text())]
        return Group(*spaced, *recent)

    def _footer(self) -> Text:
        silent = time.monotonic() - self.seen
        said, style = "", "dim"
        if silent > AWAY_SECONDS:
            said, style = f"no answer for {silent:.0f} s, trying again   ", "bold red"
        elif self.frozen is not None:
            said, style = "PAUSED   ", "reverse"
        return Text(f"{said}{FOOTER}", style=style, no_wrap=True, overflow="crop")


async def watch_screen(client: RolloutClient, overview: Overview, console: SafeConsole) -> None:
    """Show the service on the whole terminal until `q`, or until cancelled."""
    screen = Screen(overview)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_follow, client, screen)
        tasks.start_soon(_look, client, screen)
        with Live(screen, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            tasks.start_soon(read_keys, screen.press)
            tasks.start_soon(_draw, live)
            await screen.quit.wait()
            tasks.cancel_scope.cancel()


async def _draw(live: Live) -> None:
    while True:
        live.refresh()
        await anyio.sleep(1 / FRAMES_PER_SECOND)


async def _follow(client: RolloutClient, screen: Screen) -> None:
    async with aclosing(client.events()) as events:
        async for event in events:
            screen.events.append(event)


async def _look(client: RolloutClient, screen: Screen) -> None:
    while True:
        await anyio.sleep(LOOK_SECONDS)
        screen.update(await client.overview())


async def read_keys(press: Callable[[str], None]) -> None:
    """Call `press` with each key until cancelled; do nothing without a terminal to read from."""
    if not sys.stdin.isatty():
        return
    descriptor = sys.stdin.fileno()
    with unbuffered(descriptor):
        while True:
            await anyio.wait_readable(descriptor)
            keys = os.read(descriptor, 64)
            if not keys:  # the terminal is gone
                return
            for key in keys.decode(errors="ignore"):
                press(key)


@contextmanager
def unbuffered(descriptor: int) -> Iterator[None]:
    """Have the terminal hand over each key at once, and echo none, in the block; then restore it."""
    import termios
    import tty

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSANOW)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)

"""The output of `watch` without a terminal: counts from the overview, speed from the event stream."""

from __future__ import annotations

import time
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field

import anyio

from api_schemas.events import Event
from api_schemas.rollouts import RolloutState
from api_schemas.views.overview import Overview
from rollout_client.client import RolloutClient
from rollout_service.cli import common

LINE_SECONDS = 3.0
RATE_SECONDS = 30.0
STATE_EVENT = "rollout.state"


@dataclass(slots=True)
class Speed:
    """How fast rollouts end on all nodes; an overview has the speed of one."""

    ended: deque[float] = field(default_factory=deque)
    began: float = field(default_factory=time.monotonic)

    async def follow(self, client: RolloutClient) -> None:
        async with aclosing(client.events()) as events:
            async for event in events:
                if event.kind == STATE_EVENT and RolloutState(str(event.data["state"])).terminal:
                    self.ended.append(time.monotonic())

    def rate(self) -> float:
        """Return the rate over the last `RATE_SECONDS`, or since the watch began."""
        now = time.monotonic()
        while self.ended and self.ended[0] < now - RATE_SECONDS:
            self.ended.popleft()
        return len(self.ended) / max(1.0, min(RATE_SECONDS, now - self.began))


def line(overview: Overview, rate: float) -> str:
    counts = [f"{overview.counts[state]} {state}" for state in RolloutState if overview.counts.get(state)]
    sandboxes = common.count(sum(node.live for node in overview.nodes), "sandbox", "sandboxes")
    engines = common.count(len(overview.backends), "engine")
    holds = [hold.reason for node in overview.nodes if node.waiting for hold in node.holds]
    said = ", ".join([*counts, sandboxes, engines, f"{rate:.1f} rollouts/s"])
    said += f"; takes no work: {' '.join(overview.reasons)}" if overview.reasons else ""
    return said + (f"; sandboxes wait: {'; '.join(holds)}" if holds else "")


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
    speed = Speed()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(speed.follow, client)
        while True:
            await anyio.sleep(LINE_SECONDS)
            console.print(line(await client.overview(), speed.rate()), soft_wrap=True)

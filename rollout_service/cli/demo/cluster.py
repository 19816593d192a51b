"""A cluster on this machine for the demo: a Redis, an engine, and several nodes, of which one is killed on the way.

Guarantees: everything that was started has ended when the block is left; the state of all of it is in one folder.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from api_schemas.nodes import NodeState, NodeView
from rollout_client.client import RolloutClient
from rollout_service.cli.common import CommandError
from rollout_service.cli.console import table
from rollout_service.cli.server_child import ServerChild, running_child, stop
from rollout_service.cli.submit.progress import Tally
from sandboxes.host.children import start_process

REDIS_SECONDS = 30.0
LINE_SECONDS = 3.0
KILL_AT = 0.3
"""The share of the rollouts that have ended when a node is killed, if it works on any."""
KILL_LATEST = 0.6
"""The share at which it is killed all the same."""
_REDIS = {"port": "0", "save": "", "appendonly": "yes", "appendfsync": "always", "unixsocketperm": "700"}


@dataclass(frozen=True, slots=True)
class DemoCluster:
    """The running nodes, the first of which is asked."""

    nodes: Sequence[ServerChild]

    @property
    def client(self) -> RolloutClient:
        return self.nodes[0].client

    def kill_last(self) -> str:
        """Kill the last node as a power failure would, and return its name."""
        self.nodes[-1].process.kill()
        return name_of(len(self.nodes))


def name_of(number: int) -> str:
    return f"node-{number}"


@asynccontextmanager
async def running_cluster(folder: Path, count: int, flags: Sequence[str]) -> AsyncIterator[DemoCluster]:
    """Run nodes that share a Redis; `flags` are those of each service.

    Raises:
        CommandError: There is no Redis server, or something does not start.
    """
    await anyio.Path(folder).mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(_running_redis(folder))
        config = folder / "cluster.toml"
        config.write_text(f'[store]\nurl = "{url}"\n')
        nodes: list[ServerChild] = []
        for number in range(1, count + 1):  # one after another: they share the cores of this machine
            name = name_of(number)
            own = ["--config", str(config), "--node-name", name]
            nodes.append(await stack.enter_async_context(running_child(folder / name, [*own, *flags])))
        yield DemoCluster(nodes)


@asynccontextmanager
async def _running_redis(folder: Path) -> AsyncIterator[str]:
    """Run a durable Redis on a Unix socket; yield its URL."""
    program = _redis_server()
    # A socket's path has at most 107 bytes, so it cannot be in a folder that the caller chooses.
    runtime = Path(tempfile.mkdtemp(prefix="rollout-redis-"))
    socket = runtime / "redis.sock"
    options = _REDIS | {"dir": str(folder), "unixsocket": str(socket)}
    command = [program, *(part for name, value in options.items() for part in (f"--{name}", value))]
    with (folder / "redis.log").open("wb") as log:
        process = await start_process(command, stdout=log, stderr=subprocess.STDOUT, new_session=True)
    try:
        with anyio.move_on_after(REDIS_SECONDS):
            while process.returncode is None and not socket.exists():  # noqa: ASYNC110 - another process makes it
                await anyio.sleep(0.02)
        if not socket.exists():
            raise CommandError("Redis did not start", hint=f"Its log is {folder / 'redis.log'}.")
        yield f"unix://{socket}"
    finally:
        await stop(process)
        shutil.rmtree(runtime, ignore_errors=True)


def _redis_server() -> str:
    found = shutil.which("redis-server")
    if found is None:
        raise CommandError(
            "there is no redis-server in PATH",
            hint="Install Redis 7 or newer, or run scripts/demo, which gets it.",
        )
    return found


@dataclass(slots=True)
class ClusterView:
    """Shows the nodes and how many rollouts have ended, live on a terminal and in lines elsewhere."""

    console: Console
    tally: Tally
    nodes: Sequence[NodeView] = ()
    _said: float = field(default_factory=time.monotonic)

    @property
    def is_last_busy(self) -> bool:
        """Whether the last node worked on rollouts when it was last heard of."""
        return bool(self.nodes) and self.nodes[-1].rollouts > 0

    def __rich__(self) -> RenderableType:
        rows = table("node", "state", "rollouts", "ended", "sandboxes", "silent for")
        for node in self.nodes:
            figures = (node.rollouts, node.finished, node.in_use)
            rows.add_row(node.node, node.state, *map(str, figures), f"{node.silent_seconds:.0f} s")
        return Group(rows, Text(f"{self.tally.count}/{self.tally.total}: {self.tally}"))

    def line(self) -> str:
        parts = [
            f"{node.node} dead"
            if node.state is NodeState.DEAD
            else f"{node.node} {node.rollouts} ({node.finished})"
            for node in self.nodes
        ]
        return f"{self.tally.count}/{self.tally.total}: {', '.join(parts)}"

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    async def shown(self, client: RolloutClient) -> None:
        if self.console.is_terminal:
            with Live(self, console=self.console, refresh_per_second=4):
                await self._look(client)
        await self._look(client)

    async def _look(self, client: RolloutClient) -> None:
        while True:
            self.nodes = await client.nodes()
            if not self.console.is_terminal and time.monotonic() - self._said >= LINE_SECONDS:
                self._said = time.monotonic()
                self.say(self.line())
            await anyio.sleep(0.25)

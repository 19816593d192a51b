"""A cluster on this machine: a Redis and several nodes, with all state in one folder; all end with the block."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio

from rollout_service.cli.common import CommandError
from rollout_service.cli.server_child import ServerChild, running_child, stop
from sandboxes.host.children import start_process

REDIS_SECONDS = 30.0
_REDIS = {"port": "0", "save": "", "appendonly": "yes", "appendfsync": "always", "unixsocketperm": "700"}


def name_of(number: int) -> str:
    return f"node-{number}"


@asynccontextmanager
async def running_cluster(folder: Path, count: int, flags: Sequence[str]) -> AsyncIterator[Sequence[ServerChild]]:
    """Run nodes that share a Redis; `flags` are those of each service."""
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
        yield nodes


@asynccontextmanager
async def _running_redis(folder: Path) -> AsyncIterator[str]:
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

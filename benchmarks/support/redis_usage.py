"""A Redis server for a benchmark, and what a store uses of it."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import redis.asyncio
from common import HERE, START_SECONDS
from redis.exceptions import ConnectionError as NoConnectionError

from rollout_service.cli.server_child import stop
from sandboxes.host.children import start_process

NOTED_SECONDS, NOTED_COMMANDS = 0.0005, 100_000
_ANSWERED_COMMANDS = ("fcall", "fcall_ro", "ssubscribe", "sunsubscribe")
"""The commands that services send; others are those that functions call inside Redis."""


@dataclass(frozen=True, slots=True)
class RedisUsage:
    """What a server has used since its start."""

    memory_bytes: int
    calls: int
    """Functions that services called, and topics that they began or ceased to follow."""
    commands: int
    """Commands that ran, those inside functions included."""
    log_bytes: int
    """The size of the append-only file."""
    network_bytes: int
    """Bytes in both directions."""
    cpu_seconds: float
    """CPU time of the thread that runs commands."""


class MeasuredRedis:
    """A durable server on a Unix socket."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def url(self) -> str:
        return f"unix://{self._folder / 'redis.sock'}"

    async def usage(self) -> RedisUsage:
        """Ask the server what it uses."""
        async with redis.asyncio.Redis(unix_socket_path=str(self._folder / "redis.sock")) as client:
            memory: dict[str, Any] = await client.info("memory")
            persistence: dict[str, Any] = await client.info("persistence")
            stats: dict[str, Any] = await client.info("commandstats")
            network: dict[str, Any] = await client.info("stats")
            cpu: dict[str, Any] = await client.info("cpu")
        calls = {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}
        return RedisUsage(
            memory_bytes=memory["used_memory"],
            calls=sum(calls.get(name, 0) for name in _ANSWERED_COMMANDS),
            commands=sum(calls.values()),
            log_bytes=persistence.get("aof_current_size", 0),
            network_bytes=network["total_net_input_bytes"] + network["total_net_output_bytes"],
            cpu_seconds=cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"],
        )

    async def note_slow_commands(self) -> None:
        """Note from now on which commands take longer than `NOTED_SECONDS`."""
        async with redis.asyncio.Redis(unix_socket_path=str(self._folder / "redis.sock")) as client:
            await client.config_set("slowlog-log-slower-than", int(NOTED_SECONDS * 1e6))
            await client.config_set("slowlog-max-len", NOTED_COMMANDS)
            await client.slowlog_reset()

    async def slow_commands(self) -> list[float]:
        """Return the seconds of the commands that were noted, the newest of them."""
        async with redis.asyncio.Redis(unix_socket_path=str(self._folder / "redis.sock")) as client:
            return [entry["duration"] / 1e6 for entry in await client.slowlog_get(NOTED_COMMANDS)]

    async def flush_seconds(self, writes: int = 200) -> float:
        """Return the median time of a flush: how much longer than a read one write after the other takes."""
        async with redis.asyncio.Redis(unix_socket_path=str(self._folder / "redis.sock")) as client:
            taken = {}
            for name in ("get", "set"):
                times = []
                for number in range(writes):
                    began = time.perf_counter()
                    await (client.get("probe") if name == "get" else client.set("probe", number))
                    times.append(time.perf_counter() - began)
                taken[name] = statistics.median(times)
            await client.delete("probe")
        return max(0.0, taken["set"] - taken["get"])

    async def events(self, stream: str) -> list[dict[bytes, bytes]]:
        """Return the fields of all events of a stream, oldest first."""
        async with redis.asyncio.Redis(unix_socket_path=str(self._folder / "redis.sock")) as client:
            entries: list[tuple[bytes, dict[bytes, bytes]]] = await client.xrange(stream)
        return [fields for _, fields in entries]

    async def wait_until_ready(self) -> None:
        async with redis.asyncio.Redis(unix_socket_path=str(self._folder / "redis.sock")) as client:
            with anyio.fail_after(START_SECONDS):
                while not await _answers(client):  # noqa: ASYNC110 - another process cannot set an event
                    await anyio.sleep(0.02)


async def _answers(client: redis.asyncio.Redis) -> bool:
    try:
        return bool(await client.ping())
    except (NoConnectionError, FileNotFoundError):
        return False


async def redis_program() -> Path:
    """Return the path of a Redis server, which is installed if it is missing."""
    done = await anyio.run_process([str(HERE.parent / "scripts" / "install-redis")])
    return Path(done.stdout.decode().split()[-1])


@asynccontextmanager
async def measured_redis() -> AsyncIterator[MeasuredRedis]:
    """Run a server that flushes every write to the disk of the folder for temporary files."""
    program = str(await redis_program())
    folder = Path(tempfile.mkdtemp(prefix="rb-"))
    options = {
        "port": "0",
        "unixsocket": str(folder / "redis.sock"),
        "dir": str(folder),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "always",
        "auto-aof-rewrite-percentage": "0",
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
    process = await start_process(
        [program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, new_session=True
    )
    try:
        server = MeasuredRedis(folder)
        await server.wait_until_ready()
        yield server
    finally:
        with anyio.CancelScope(shield=True):
            await stop(process)
            await anyio.to_thread.run_sync(shutil.rmtree, folder)

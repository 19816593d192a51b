"""The same turns without the service: an HTTP call to the engine and a line to a running bash, in a bare loop."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import anyio
import orjson

PROMPT_TOKENS = 200
END = b"END\n"


@dataclass(frozen=True, slots=True)
class Bare:
    """What a bare loop took."""

    turns_per_second: float
    seconds_per_turn: list[float]
    """Mean of each loop."""
    tool_seconds: float
    """Mean seconds of a command, over all loops."""

    def added_ms(self, engine_seconds: float) -> float:
        """Median milliseconds per turn beside the engine's and the tool's own."""
        return (statistics.median(self.seconds_per_turn) - engine_seconds - self.tool_seconds) * 1e3


async def bare_turns(
    engine_url: str, command: str, *, concurrency: int, turns: int, spread_seconds: float = 0.0
) -> Bare:
    """Run so many loops at once, each of so many turns; their starts are spread over so many seconds."""
    per_turn: list[float] = []
    in_tools: list[float] = []
    started = time.perf_counter()

    async def loop(http: aiohttp.ClientSession) -> None:
        async with shell() as bash:
            begun, tool = time.perf_counter(), 0.0
            for number in range(turns):
                await generate(http, engine_url, PROMPT_TOKENS + number)
                before = time.perf_counter()
                await run(bash, command)
                tool += time.perf_counter() - before
        per_turn.append((time.perf_counter() - begun) / turns)
        in_tools.append(tool / turns)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, anyio.create_task_group() as group:
        for _ in range(concurrency):
            group.start_soon(loop, http)
            await anyio.sleep(spread_seconds / concurrency)
    seconds = time.perf_counter() - started
    return Bare(concurrency * turns / seconds, per_turn, statistics.mean(in_tools))


async def generate(http: aiohttp.ClientSession, engine_url: str, tokens: int) -> dict[str, Any]:
    """One sampled turn."""
    body = {
        "input_ids": [0] * tokens,
        "sampling_params": {"max_new_tokens": 512},
        "return_logprob": True,
        "stream": False,
    }
    headers = {"Content-Type": "application/json"}
    async with http.post(f"{engine_url}/generate", data=orjson.dumps(body), headers=headers) as answer:
        answer.raise_for_status()
        return dict(orjson.loads(await answer.read()))


@asynccontextmanager
async def shell() -> AsyncIterator[asyncio.subprocess.Process]:
    """A bash that runs what it reads."""
    bash = await asyncio.create_subprocess_exec(
        "bash", "--norc", "--noprofile", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield bash
    finally:
        bash.kill()
        await bash.wait()


async def run(bash: asyncio.subprocess.Process, command: str) -> bytes:
    """Run one command and read what it prints."""
    assert bash.stdin is not None
    assert bash.stdout is not None
    bash.stdin.write(f"{command}; echo END\n".encode())
    await bash.stdin.drain()
    return await bash.stdout.readuntil(END)

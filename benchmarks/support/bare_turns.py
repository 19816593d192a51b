"""The same turns without the service: an HTTP call to the engine, and a line to a running bash, in a bare loop."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
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
    turns_per_second: float
    engine_ms: float
    """The median of the HTTP calls."""
    tool_ms: float
    """The median of the commands, except each loop's first, which waits for its shell to start."""


async def bare_turns(
    engine_url: str,
    command: str,
    *,
    concurrency: int,
    turns: int,
    spread_seconds: float = 0.0,
    prompts: Sequence[list[int]] = (),
) -> Bare:
    """Run `concurrency` loops of `turns` turns, started over `spread_seconds`; `prompts` begin their prompts."""
    engine: list[float] = []
    tool: list[float] = []

    async def loop(http: aiohttp.ClientSession, place: int) -> None:
        begin = prompts[place] if prompts else []
        await anyio.sleep(place * spread_seconds / concurrency)
        async with shell() as bash:
            for number in range(turns):
                begun = time.perf_counter()
                await generate(http, engine_url, begin + [0] * (PROMPT_TOKENS + number))
                answered = time.perf_counter()
                await run(bash, command)
                engine.append(answered - begun)
                if number:
                    tool.append(time.perf_counter() - answered)

    started = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, anyio.create_task_group() as group:
        for place in range(concurrency):
            group.start_soon(loop, http, place)
    rate = concurrency * turns / (time.perf_counter() - started)
    return Bare(rate, statistics.median(engine) * 1e3, statistics.median(tool) * 1e3)


async def generate(http: aiohttp.ClientSession, engine_url: str, input_ids: list[int]) -> dict[str, Any]:
    body = {
        "input_ids": input_ids,
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
    """Run a bash that executes what it reads."""
    bash = await asyncio.create_subprocess_exec(
        "bash", "--norc", "--noprofile", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield bash
    finally:
        bash.kill()
        await bash.wait()


async def run(bash: asyncio.subprocess.Process, command: str) -> bytes:
    assert bash.stdin is not None
    assert bash.stdout is not None
    bash.stdin.write(f"{command}; echo END\n".encode())
    await bash.stdin.drain()
    return await bash.stdout.readuntil(END)

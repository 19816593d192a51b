"""Runs the service's own engine, and starts it again whenever it exits.

Guarantees: it comes back at the same address, where its pool's probes find it and give it the pool's weights before any
request, like every engine that returns. The delay before a start grows while starts fail or do not last. When the block
is left, no engine runs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio
import structlog

from rollout_service.engines.local_servers.process import EngineStartError, ServerProcess

log = structlog.get_logger(__name__)

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""An engine that ran for this long is started again after the first delay."""


@asynccontextmanager
async def kept_running(make: Callable[[int], ServerProcess]) -> AsyncIterator[str]:
    """Run an engine and yield its address; `make` makes one for a port, 0 for a free one.

    Raises:
        EngineStartError: The first start failed.
    """
    async with make(0) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(_start_again, engine, make)
        yield engine.url
        tasks.cancel_scope.cancel()


async def _start_again(engine: ServerProcess, make: Callable[[int], ServerProcess]) -> None:
    port, delay = urlsplit(engine.url).port or 0, FIRST_DELAY_SECONDS
    code, started = await engine.ended(), time.monotonic()
    while True:
        log.error("the engine ended; starting it again", url=engine.url, exit_code=code, in_seconds=delay)
        await anyio.sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        try:
            async with make(port) as successor:
                started = time.monotonic()
                log.info("the engine runs again", url=successor.url)
                code = await successor.ended()
        except EngineStartError as error:
            log.error("the engine could not be started", error=str(error), hint=error.hint)
            continue
        if time.monotonic() - started >= STEADY_SECONDS:
            delay = FIRST_DELAY_SECONDS

"""Scripted engines as a process."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from rollout_service.testing.sglang_engine import ScriptedEngine


async def serve(*engines: ScriptedEngine, address: Path | None = None, port_file: Path | None = None) -> None:
    """Serve until the first engine dies; files get the URLs, a line each, and the first one's port, at their start."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        urls = [engine.url for engine in engines]
        for file, text in ((address, "\n".join(urls)), (port_file, urls[0].rpartition(":")[2])):
            if file is not None:
                partial = anyio.Path(file).with_name(f"{file.name}.partial")
                await partial.write_text(text)
                await partial.replace(file)
        await engines[0].died.wait()

"""Threads for work that takes long, so that neither the event loop nor other work of the service waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

THREADS = 4
"""The most requests that are read or rendered at once: each may take some hundred MB while it lasts."""

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
_limiter: RunVar[CapacityLimiter] = RunVar("_gateway_threads")


async def in_thread(function: Callable[[*Arguments], T], *args: *Arguments) -> T:
    """Call a function in a thread, once one of them is free."""
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = CapacityLimiter(THREADS)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(function, *args, limiter=limiter)

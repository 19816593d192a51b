"""Waits in async tests."""

from collections.abc import Callable
from inspect import isawaitable
from typing import Any

import anyio


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait until a function, which may be a coroutine function, returns something true, and return it."""
    with anyio.fail_after(seconds):
        while True:
            result = condition()
            if isawaitable(result):
                result = await result
            if result:
                return result
            await anyio.sleep(0.002)


async def collect(results: list[Any], call: Callable[[], Any]) -> None:
    """Append the result of a coroutine function, for calls that a task group starts."""
    results.append(await call())

"""Requests that wait: they end when nobody waits for their answer any more.

Guarantees: a wait is cancelled as soon as its caller hangs up, so a batch is not leased to somebody who is gone; errors
of the wait come out as they are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from fastapi import Request

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""The status, for the log alone, of a request whose caller hung up before there was an answer."""


async def cancel_on_disconnect(request: Request, wait: Callable[[], Awaitable[T]]) -> T | None:
    """Return the result of a wait, or None if the caller hung up before there was one.

    Call it where the body has been read.
    """
    scope = anyio.CancelScope()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    result: T | None = None
    failure: Exception | None = None
    async with anyio.create_task_group() as watching:
        watching.start_soon(watch)
        with scope:
            try:
                result = await wait()
            except Exception as error:  # noqa: BLE001 - raised below, where no group wraps it
                failure = error
        watching.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result

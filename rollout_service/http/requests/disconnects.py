"""Requests whose work ends when their client disconnects.

Guarantees: the work is cancelled as soon as its client disconnects, so no batch is leased to a client that is gone, and
no prompt is made for it. Errors of the work are raised as they are, not in a group.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from starlette.types import Receive

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""The status that the log shows for a request whose client disconnected before it was answered."""


async def cancel_on_disconnect(receive: Receive, work: Callable[[], Awaitable[T]]) -> T | None:
    """Return the result of some work for a request, or None if its client disconnects first.

    The body must have been read before.
    """
    scope = anyio.CancelScope()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    result: T | None = None
    failure: Exception | None = None
    async with anyio.create_task_group() as watching:
        watching.start_soon(watch)
        with scope:
            try:
                result = await work()
            except Exception as error:  # noqa: BLE001 - raised below, where no group wraps it
                failure = error
        watching.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result

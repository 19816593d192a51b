"""Explains on stderr why a server does not take work, for as long as it does not."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from rollout_client.client import RolloutClient
    from rollout_service.cli.submit.progress import ProgressView

CHECK_SECONDS = 3.0
AGAIN_SECONDS = 30.0
"""How often the same reason is repeated."""


@asynccontextmanager
async def explain_waiting(client: RolloutClient, view: ProgressView) -> AsyncIterator[None]:
    """Tell the user, during the block, why the server takes no work whenever it does not."""
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_explain, client, view)
            yield
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None  # the block's own, as if there were no group
        raise


async def _explain(client: RolloutClient, view: ProgressView) -> None:
    said, said_at = "", 0.0
    while True:
        reason = await _reason(client)
        if reason and (reason != said or time.monotonic() - said_at >= AGAIN_SECONDS):
            view.say(f"Waiting: {reason}")
            said_at = time.monotonic()
        elif said and not reason:
            view.say("The server is ready again.")
        said = reason
        await anyio.sleep(CHECK_SECONDS)


async def _reason(client: RolloutClient) -> str:
    """Return why the server takes no work; empty if it does, or if it cannot be asked."""
    from rollout_client.client import ClientError, UnreachableError

    try:
        return " ".join((await client.readiness()).reasons)
    except UnreachableError as error:
        return str(error)
    except ClientError:  # the requests get the same error, and report it
        return ""

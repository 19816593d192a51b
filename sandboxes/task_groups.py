"""Task groups for work that is one thing to its caller: it fails with one typed error, not with a group of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def open_task_group() -> AsyncIterator[TaskGroup]:
    """Open a task group that raises the first failure itself instead of an ExceptionGroup; the group is its cause."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures

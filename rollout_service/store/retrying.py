"""Patience with a store that fails for a while.

Every store logs one line when it begins to fail, and one when it works again. The many who wait for it meanwhile log
nothing that is shown by default.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import structlog

from rollout_service.base.errors import StoreError

log = structlog.get_logger(__name__)

T = TypeVar("T")

STORE_RETRY_SECONDS = 1.0


async def retry_until_stored(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Repeat an idempotent call to the store until it succeeds.

    Raises:
        DefectError: The call itself is wrong.
    """
    while True:
        try:
            return await call()
        except StoreError as error:
            log.debug("the store failed; trying again", doing=what, error=str(error), hint=error.hint)
        await anyio.sleep(STORE_RETRY_SECONDS)

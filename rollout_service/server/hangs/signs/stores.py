"""Whether the store answers, and can be written."""

from __future__ import annotations

import time

from rollout_service.base.errors import StoreError
from rollout_service.server.hangs.rules import Signs
from rollout_service.server.hangs.signs.engines import PROBE_SECONDS
from rollout_service.store.contract import Store


class StoreProbe:
    """Asks the store something small; its calls cannot be cut short, so one of them at most is under way."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked_at: float | None = None
        self._failed = False

    @property
    def is_idle(self) -> bool:
        """Whether no question is under way."""
        return self._asked_at is None

    async def ask(self) -> None:
        """Ask, and note whether an answer came."""
        self._asked_at = time.perf_counter()
        try:
            await self._store.counts()
            self._failed = False
        except StoreError:
            self._failed = True
        finally:
            self._asked_at = None

    def signs(self) -> Signs:
        """Return whether the store answers and can be written."""
        waits = self._asked_at is not None and time.perf_counter() - self._asked_at > PROBE_SECONDS
        return Signs(responds=not (waits or self._failed or self._store.problem is not None))

    @property
    def error(self) -> str:
        """Why writes fail, as far as is known."""
        problem = self._store.problem
        return "" if problem is None else str(problem)

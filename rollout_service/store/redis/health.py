"""Whether a store's Redis works, and its shared folder, as they were last seen.

Guarantee: the log says once that it fails, and once that it works again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import structlog

from rollout_service.base.errors import StoreError

log = structlog.get_logger(__name__)

PROBLEM_SECONDS = 3.0
"""The shortest time for which `problem` reports a failure."""


@dataclass(slots=True)
class RedisHealth:
    """The failures of a Redis and of the folder beside it; used on the event loop alone."""

    address: str
    errors: int = 0
    """The number of calls that failed."""
    _open: dict[str, StoreError] = field(default_factory=dict)
    _last: StoreError | None = None
    _failed_at: float = 0.0
    _is_reported: bool = False

    @property
    def problem(self) -> StoreError | None:
        """Why the store cannot be used, or None. One success does not end the problem of a memory that is full."""
        if self._open:
            return next(iter(self._open.values()))
        return self._last if time.monotonic() - self._failed_at < PROBLEM_SECONDS else None

    def failed(self, part: str, error: StoreError, *, calls: int = 0) -> None:
        """Record a failure of a part, with the number of calls that it failed."""
        self._open[part] = self._last = error
        self._failed_at = time.monotonic()
        self.errors += calls
        self._report()

    def succeeded(self, part: str) -> None:
        """Record that a part works."""
        self._open.pop(part, None)
        self._report()

    def _report(self) -> None:
        problem = self.problem
        if problem is not None and not self._is_reported:
            log.error("the store fails", path=self.address, error=str(problem), hint=problem.hint)
        elif problem is None and self._is_reported:
            log.info("the store works again", path=self.address)
        self._is_reported = problem is not None

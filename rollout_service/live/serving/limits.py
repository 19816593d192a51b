"""How many answers a user may ask for. Guarantee: memory is bounded by the users of the last minute."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from rollout_service.live.errors import RateLimitedError

MINUTE = 60.0


@dataclass(slots=True)
class _Allowance:
    left: float
    at: float


class RequestRate:
    """A limit that refills evenly."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = per_minute
        self._clock = clock
        self._users: OrderedDict[str, _Allowance] = OrderedDict()

    def take(self, user: str, count: int = 1) -> None:
        """Count a request, or further answers that one asks for.

        Raises:
            RateLimitedError: The user has asked for too many.
        """
        if self._most is None:
            return
        now, per_second = self._clock(), self._most / MINUTE
        self._forget(now)
        allowance = self._users.get(user) or _Allowance(self._most, now)
        left = min(self._most, allowance.left + (now - allowance.at) * per_second)
        if left < count:
            raise RateLimitedError(
                f"this user may ask for {self._most} answers a minute",
                hint="Repeat the request later, or ask for fewer answers at once.",
                seconds=(count - left) / per_second,
            )
        self._users[user] = _Allowance(left - count, now)
        self._users.move_to_end(user)

    def _forget(self, now: float) -> None:
        """Forget users whose allowance is whole again."""
        while self._users and next(iter(self._users.values())).at <= now - MINUTE:
            self._users.popitem(last=False)

"""Errors of live sessions. Each API's dialect tells them in its own form.

RolloutEndedError
 `- SessionEndedError        the session was closed or deleted                      410
TryLaterError
 |- PoolHeldError            the pool was paused for longer than a request waits    503
 `- RateLimitedError         too many requests of a user, or too many sessions      429
"""

from __future__ import annotations

from http import HTTPStatus

from rollout_service.base.errors import TryLaterError
from rollout_service.gateway.errors import RolloutEndedError


class SessionEndedError(RolloutEndedError):
    """The session has ended."""

    code = "session_ended"

    def __init__(self, because: str) -> None:
        super().__init__(
            f"this session has ended ({because})",
            hint="Open another one with POST /v1/sessions; its `continues` can name this one.",
        )


class PoolHeldError(TryLaterError):
    """The pool took no requests for longer than a session's request waits. Nothing was recorded."""

    code = "pool_held"


class RateLimitedError(TryLaterError):
    """There are too many requests of one user, or too many open sessions."""

    code = "rate_limited"
    status = HTTPStatus.TOO_MANY_REQUESTS

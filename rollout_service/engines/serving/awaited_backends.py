"""Backends that are to be registered and may not answer yet.

Registering one is tried until it works, fails for a reason that does not pass, or is given up; why it is not there yet,
or never will be, is kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import structlog
from anyio.abc import TaskGroup

from api_schemas.inference import BackendSpec
from rollout_service.base.errors import StoreError, describe
from rollout_service.engines.errors import InferenceError

log = structlog.get_logger(__name__)

RECONNECT_SECONDS = 5.0

Register = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class _Reconnection:
    scope: anyio.CancelScope
    ended: anyio.Event


class AwaitedBackends:
    def __init__(self) -> None:
        self.specs: dict[str, BackendSpec] = {}
        """Those that are still tried."""
        self.reasons: dict[str, str] = {}
        """Why each is not registered yet; also those that were given up for good."""
        self._attempts: dict[str, _Reconnection] = {}

    def __contains__(self, backend_id: str) -> bool:
        return backend_id in self.specs

    def begin(self, tasks: TaskGroup, backend_id: str, spec: BackendSpec, register: Register) -> None:
        """Try in the background, unless that has begun; `register` is one attempt."""
        if backend_id in self.specs:
            return
        self.reasons[backend_id] = "not tried yet"
        self.specs[backend_id] = spec
        self._attempts[backend_id] = attempt = _Reconnection(anyio.CancelScope(), anyio.Event())
        tasks.start_soon(self._reconnect, backend_id, str(spec.url), register, attempt)

    async def end(self, backend_id: str) -> bool:
        """Return whether it was still tried; it may begin again."""
        if backend_id not in self.specs:
            return False
        attempt = self._attempts[backend_id]
        attempt.scope.cancel()
        await attempt.ended.wait()
        self.specs.pop(backend_id, None)
        return True

    def forget(self, backend_id: str) -> None:
        """Stop waiting for a backend that is there, or is not wanted."""
        self.reasons.pop(backend_id, None)
        self.specs.pop(backend_id, None)

    async def _reconnect(self, backend_id: str, url: str, register: Register, attempt: _Reconnection) -> None:
        try:
            with attempt.scope:
                await self._register_in_the_end(backend_id, url, register)
        finally:
            attempt.ended.set()

    async def _register_in_the_end(self, backend_id: str, url: str, register: Register) -> None:
        while backend_id in self.specs:
            try:
                await register()
            except (InferenceError, StoreError) as error:
                self.reasons[backend_id] = str(error)
                event = "backend does not answer yet; trying again"
                if isinstance(error, StoreError):
                    event = "backend cannot be recorded yet; trying again"
                log.warning(event, url=url, error=str(error), hint=error.hint)
                await anyio.sleep(RECONNECT_SECONDS)
            except Exception as error:
                info = describe(error)
                self.reasons[backend_id] = info.message
                defect = error if info.code == "internal_error" else None
                log.error("backend cannot be used", url=url, error=info.message, hint=info.hint, exc_info=defect)
                self.specs.pop(backend_id, None)

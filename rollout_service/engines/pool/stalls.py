"""Polls what engines report about themselves, tells the router, and ends calls that make no progress.

Guarantees: a call that has been open for `stall_seconds`, while the engine neither answered any call of the pool nor
streamed a token nor reported any change in its work, ends and continues elsewhere. An engine that reports nothing at
all is covered by its probes and time limits.
"""

from dataclasses import dataclass

import anyio

from rollout_service.engines.contract import BackendLoad
from rollout_service.engines.errors import BackendRejected, InferenceError
from rollout_service.engines.pool.backend_handle import BackendHandle
from rollout_service.engines.pool.options import PoolOptions
from rollout_service.engines.pool.registry import BackendRegistry
from rollout_service.engines.routing import Router


@dataclass(slots=True)
class _LastProgress:
    """The last sign of progress of an engine."""

    delivered: int
    """The answers, and the chunks of answers."""
    signature: str
    at: float


class StallDetector:
    """Asks the backends of a pool how busy they are, and ends the calls of those that stall."""

    def __init__(self, registry: BackendRegistry, router: Router, options: PoolOptions) -> None:
        self._registry = registry
        self._router = router
        self._options = options

    async def watch(self, handle: BackendHandle) -> None:
        """Follow one engine until cancelled, or until it turns out to report nothing."""
        last = _LastProgress(_delivered(handle), "", handle.clock())
        while True:
            try:
                load = await self._ask(handle)
            except BackendRejected:
                return
            self._judge(handle, last, load)
            await anyio.sleep(self._options.load_interval)

    async def _ask(self, handle: BackendHandle) -> BackendLoad | None:
        try:
            with anyio.fail_after(self._options.probe_timeout):
                load = await handle.backend.load()
        except BackendRejected:
            raise
        except (InferenceError, TimeoutError):
            return None
        if handle.id in self._registry:
            self._router.observe(handle.id, load)
        return load

    def _judge(self, handle: BackendHandle, last: _LastProgress, load: BackendLoad | None) -> None:
        now = handle.clock()
        is_working = load is not None and load.running + load.waiting > 0
        if load is not None and is_working and load.signature != last.signature:
            last.signature, last.at = load.signature, now
        delivered = _delivered(handle)
        if delivered != last.delivered or self._registry.paused is not None:
            last.delivered, last.at = delivered, now
        patience = self._options.stall_seconds
        if now - last.at >= patience:
            handle.drop_calls(f"reported no progress for {patience:g} s", older_than=patience)


def _delivered(handle: BackendHandle) -> int:
    return handle.served + handle.chunks

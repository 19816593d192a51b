"""Whether engines answer, and whether they do anything.

Guarantees: only an engine that a step has waited for without progress is asked, once a second at most, and no look
takes longer than `PROBE_SECONDS`. An engine that cannot be reached once is not gone: it has to fail `FAILURES` looks in
a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio

from api_schemas.inference import BackendView
from api_schemas.views.hangs import HangFinding, HangVerdict
from rollout_service.engines.contract import BackendLoad
from rollout_service.engines.errors import BackendRejected, InferenceError
from rollout_service.engines.pool.backend_handle import OTHER_VERSION_HINT, BackendHandle
from rollout_service.server.hangs.rules import UNSEEN, Signs
from rollout_service.server.hangs.waits import at

PROBE_SECONDS = 2.0
FAILURES = 2


@dataclass(slots=True)
class Stillness:
    """How long something has stayed the same."""

    value: object = None
    changed_at: float = field(default_factory=time.perf_counter)

    def see(self, value: object) -> None:
        if value != self.value:
            self.value, self.changed_at = value, time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long ago it changed, or was first seen."""
        return time.perf_counter() - self.changed_at


@dataclass(slots=True)
class _SeenEngine:
    stillness: Stillness = field(default_factory=Stillness)
    load: BackendLoad | None = None
    failures: int = 0
    answers: int = 0
    error: str = ""


class EngineProbes:
    def __init__(self, find: Callable[[str], BackendHandle | None]) -> None:
        self._find = find
        self._seen: dict[str, _SeenEngine] = {}

    def forget(self) -> None:
        self._seen = {}

    async def look(self, backend_ids: Iterable[str]) -> None:
        """Ask these engines how they are, and forget all others."""
        self._seen = {one: self._seen.get(one) or _SeenEngine() for one in backend_ids}
        async with anyio.create_task_group() as tasks:
            for backend_id, seen in self._seen.items():
                tasks.start_soon(self._look_at, backend_id, seen)

    async def _look_at(self, backend_id: str, seen: _SeenEngine) -> None:
        handle = self._find(backend_id)
        if handle is None:
            seen.failures, seen.error = FAILURES, "it was removed"
            return
        try:
            with anyio.fail_after(PROBE_SECONDS):
                seen.load = await self._ask(handle)
        except (InferenceError, TimeoutError) as error:
            seen.failures += 1
            seen.error = str(error) or f"no answer within {PROBE_SECONDS:g} s"
            return
        seen.failures, seen.error = 0, ""
        seen.answers += 1
        report = None if seen.load is None else seen.load.signature
        seen.stillness.see((report, handle.served, handle.chunks))

    async def _ask(self, handle: BackendHandle) -> BackendLoad | None:
        try:
            return await handle.backend.load()
        except BackendRejected:  # it reports no load
            await handle.backend.health()
            return None

    def signs(self, backend_id: str) -> Signs:
        seen = self._seen.get(backend_id)
        if seen is None:
            return UNSEEN
        if seen.failures:
            return Signs(responds=False if seen.failures >= FAILURES else None)
        still = seen.stillness.seconds if seen.answers and seen.load is not None else None
        is_idle = seen.load is not None and seen.load.running + seen.load.waiting == 0
        return Signs(responds=True if seen.answers else None, still_seconds=still, is_idle=is_idle)

    def load(self, backend_id: str) -> BackendLoad | None:
        """Return an engine's last report of its load."""
        seen = self._seen.get(backend_id)
        return None if seen is None else seen.load

    def error(self, backend_id: str) -> str:
        seen = self._seen.get(backend_id)
        return "" if seen is None else seen.error


# Engines that sample with another version of the weights than this service gave them.

WEIGHTS: Final = "weights"


class OtherVersions:
    """The engines with other weights, and since when they are seen to have them."""

    def __init__(self, views: Callable[[], Iterable[BackendView]]) -> None:
        """Watch the engines that `views` returns. It is called at every look, and must not wait."""
        self._views = views
        self._since: dict[str, float] = {}

    def findings(self) -> Sequence[HangFinding]:
        now = time.perf_counter()
        found = [view for view in self._views() if view.sampled_version is not None]
        self._since = {view.backend_id: self._since.get(view.backend_id, now) for view in found}
        return [_finding(view, self._since[view.backend_id], now) for view in found]


def _finding(view: BackendView, since: float, now: float) -> HangFinding:
    return HangFinding(
        finding_id="",
        verdict=HangVerdict.SLOW,
        kind=WEIGHTS,
        subject=view.backend_id,
        since=at(since),
        seconds=now - since,
        responds=True,
        message=f"the engine {view.backend_id} samples with version {view.sampled_version} of the weights, but was "
        f"given version {view.weight_version}",
        hint=OTHER_VERSION_HINT,
        detail={"pool": view.pool, "version": view.sampled_version, "given": view.weight_version},
    )

"""Engines that sample with another version of the weights than this service gave them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from api_schemas.inference import BackendView
from api_schemas.views.hangs import HangFinding, HangVerdict
from rollout_service.engines.pool.backend_handle import OTHER_VERSION_HINT
from rollout_service.server.hangs.waits import at

WEIGHTS: Final = "weights"


class OtherVersions:
    """The engines with other weights, and since when they are seen to have them."""

    def __init__(self, views: Callable[[], Iterable[BackendView]]) -> None:
        """Watch the engines that `views` returns. It is called at every look, and must not wait."""
        self._views = views
        self._since: dict[str, float] = {}

    def findings(self) -> Sequence[HangFinding]:
        """Return a finding for each."""
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

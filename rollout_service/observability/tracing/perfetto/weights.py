"""The weights' side of a trace: when the engines of each pool got other weights.

Guarantee: an update of which there is an event is a slice of the time that it took. One whose event is gone is marked
where the first tokens of its version began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from api_schemas.events import Event
from rollout_service.observability.tracing.perfetto.events import ENGINES, TraceEvents


class WeightUpdates:
    """The versions that the pools' tokens are of, and what events tell about them."""

    def __init__(self) -> None:
        self._sampled: dict[str, dict[int, int]] = {}
        """By pool, the versions of its tokens, with when the first call that sampled any began."""

    def sampled(self, engine: str, version: int, at: int) -> None:
        """Add a call that sampled tokens of a version."""
        versions = self._sampled.setdefault(engine.partition("@")[0], {})
        versions[version] = min(at, versions.get(version, at))

    def write(
        self, events: TraceEvents, told: Iterable[Event], *, began: float, within: tuple[int, int]
    ) -> None:
        """Add the updates of these pools, those of events if they were within an interval of the time line."""
        by_pool: dict[str, list[Event]] = {}
        for event in told:
            by_pool.setdefault(event.subject, []).append(event)
        for order, (pool, sampled) in enumerate(sorted(self._sampled.items())):
            of_pool = by_pool.get(pool, [])
            slices = [one for one in _slices(of_pool, began) if one[0] <= within[1] and one[1] >= within[0]]
            known = {event.data.get("version") for event in of_pool}
            _, *later = sorted((at, version) for version, at in sampled.items())
            marks = [(at, version) for at, version in later if version not in known]
            if not slices and not marks:
                continue
            tid = events.thread(ENGINES, f"{pool} weights", order - len(self._sampled))
            for start, end, event in slices:
                name = f"weights {event.data.get('version')}"
                events.slice(ENGINES, tid, start, end - start, name, event.data)
            for at, version in marks:
                events.mark(ENGINES, tid, at, f"weights {version}")


def _slices(updates: Iterable[Event], began: float) -> Iterator[tuple[int, int, Event]]:
    """Yield the updates of one pool with their beginnings and ends, apart even if their times are rounded."""
    reached = round(-began * 1e6)  # 1970
    for event in updates:
        end = max(round((event.time.timestamp() - began) * 1e6), reached)
        seconds = event.data.get("seconds")
        length = round(seconds * 1e6) if isinstance(seconds, int | float) else 0
        yield max(end - length, reached), end, event
        reached = end

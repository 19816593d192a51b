"""Events: those of the service itself, and the streams that readers follow."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

import anyio
import structlog
from fastapi.sse import format_sse_event
from pydantic import JsonValue

from api_schemas.errors import FieldError
from api_schemas.events import Event, EventKind
from api_schemas.inference import BackendState, BackendView
from api_schemas.nodes import NodeState
from rollout_service.base.errors import InvalidFieldError, StoreError, did_you_mean
from rollout_service.cluster.node import Node
from rollout_service.engines.serving.orders import Announce
from rollout_service.store.contract import Store, StoreShard

log = structlog.get_logger(__name__)

MAX_WAITING = 1_024
CLOSE_SECONDS = 1.0

_Said = tuple[EventKind, str, dict[str, JsonValue]]


class Announcer:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._said, self._waiting = anyio.create_memory_object_stream[_Said](MAX_WAITING)
        self.dropped = 0
        """Events that were not written, since the store failed, too many waited, or the service had ended."""

    def announce(self, kind: EventKind, subject: str, data: dict[str, JsonValue]) -> None:
        """Queue an event, in order; never waits, and never fails."""
        try:
            self._said.send_nowait((kind, subject, data))
        except (anyio.WouldBlock, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self.dropped += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write events in the block, then the rest for at most `CLOSE_SECONDS`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write)
            try:
                yield
            finally:
                self._said.close()
                tasks.cancel_scope.deadline = anyio.current_time() + CLOSE_SECONDS

    async def _write(self) -> None:
        lost = 0
        async with self._waiting:
            async for kind, subject, data in self._waiting:
                try:
                    await self._store.record(kind, subject, data)
                except StoreError:
                    lost += 1
                    self.dropped += 1
                    continue
                if lost:
                    log.warning("events could not be recorded while the store failed", events=lost)
                    lost = 0


PREFIXES = frozenset(f"{kind.partition('.')[0]}." for kind in EventKind)


@dataclass(frozen=True, slots=True)
class EventSelection:
    kinds: frozenset[str]
    """Kinds and prefixes; empty means all."""
    subjects: frozenset[str]
    """Empty means all."""

    @classmethod
    def of(cls, kinds: Sequence[str], subjects: Sequence[str]) -> EventSelection:
        """Select these kinds, such as `run.state`, or `run.` for all of runs.

        Raises:
            InvalidFieldError: There is no such kind.
        """
        known = {*map(str, EventKind), *PREFIXES}
        texts = [f"no kind of event{did_you_mean(kind, known)}" for kind in kinds if kind not in known]
        if texts:
            raise InvalidFieldError(
                [FieldError(path="query.kind", message=text) for text in texts],
                hint="Name a kind, such as `rollout.state`, or a prefix with its dot, such as `rollout.`.",
            )
        return cls(frozenset(kinds), frozenset(subjects))

    @property
    def is_partial(self) -> bool:
        return bool(self.kinds or self.subjects)

    def has(self, kind: str, subject: str) -> bool:
        if self.subjects and subject not in self.subjects:
            return False
        return not self.kinds or kind in self.kinds or f"{kind.partition('.')[0]}." in self.kinds


TAIL_EVENTS = 4_096
PAGE_EVENTS = 1_000


@dataclass(frozen=True, slots=True)
class SentEvent:
    """An event without the line with the reader's position."""

    event_id: int
    time: datetime
    kind: str
    subject: str
    frame: bytes

    @classmethod
    def of(cls, event: Event) -> SentEvent:
        frame = format_sse_event(data_str=event.model_dump_json(), event=event.kind)
        return cls(event.event_id, event.time, event.kind, event.subject, frame)


class EventTail:
    """Keeps the newest events of a shard of the store in memory, encoded, for all readers.

    However many readers there are, an event is read from the store and encoded once. A reader that is far behind reads
    from the store until it has caught up. Nothing is skipped, and nothing comes twice.
    """

    def __init__(self, store: StoreShard) -> None:
        self._store = store
        self._lock = anyio.Lock()
        self._events: deque[SentEvent] = deque()
        self._start = self._end = 0
        """The events have ids above the first, up to the second."""

    async def after(self, seen: int, newest: int) -> list[SentEvent]:
        """Return events after the id `seen`, in order: at least one if `newest` is above it."""
        async with self._lock:
            if newest - self._end > PAGE_EVENTS:  # nobody has read for a while
                self._begin_after(newest - PAGE_EVENTS)
            if newest > self._end:
                self._add(await self._store.events(after=self._end, limit=PAGE_EVENTS))
        if seen < self._start:
            return [SentEvent.of(event) for event in await self._store.events(after=seen, limit=PAGE_EVENTS)]
        found: list[SentEvent] = []
        for event in reversed(self._events):
            if event.event_id <= seen:
                break
            found.append(event)
        return found[::-1]

    def rewind(self, newest: int) -> None:
        """Forget events that the store has lost; their ids will be reused."""
        if newest < self._end:
            self._begin_after(newest)

    def _begin_after(self, event_id: int) -> None:
        self._events.clear()
        self._start = self._end = event_id

    def _add(self, events: list[Event]) -> None:
        self._events.extend(map(SentEvent.of, events))
        if events:
            self._end = events[-1].event_id
        while len(self._events) > TAIL_EVENTS:
            self._start = self._events.popleft().event_id


PERIOD_SECONDS = 1.0
CALM_SECONDS = 5.0
"""How long sandboxes must start unhindered before a hold is reported as ended."""


class StateWatcher:
    """Announces changes that no command makes: of engines, the node, and the reasons that hold sandboxes back.

    It looks once a second, so constant changes cause at most one event a second, and short-lived states are missed.
    """

    def __init__(
        self,
        announce: Announce,
        node: Node,
        *,
        backends: Callable[[], list[BackendView]],
        claims: Callable[[], bool],
    ) -> None:
        self._announce = announce
        self._node = node
        self._backends = backends
        self._claims = claims
        self._known: dict[str, BackendView] = {}
        self._claimed = True
        self._held_since: float | None = None
        self._held_last = 0.0
        self._held: dict[str, JsonValue] = {}

    async def run(self) -> None:
        while True:
            self.look(anyio.current_time())
            await anyio.sleep(PERIOD_SECONDS)

    def look(self, now: float) -> None:
        self._look_at_backends()
        self._look_at_node()
        self._look_at_holds(now)

    def _look_at_backends(self) -> None:
        views = {view.backend_id: view for view in self._backends()}
        for backend_id, view in views.items():
            was = self._known.get(backend_id)
            if was is None or was.state is not view.state:
                self._tell_of_backend(view, view.state, was.state if was else None)
        for backend_id in self._known.keys() - views.keys():
            gone = self._known[backend_id]
            self._tell_of_backend(gone, "removed", gone.state)
        self._known = views

    def _tell_of_backend(self, view: BackendView, state: str, was: BackendState | None) -> None:
        data: dict[str, JsonValue] = {"node": self._node.name, "pool": view.pool, "state": str(state)}
        data["was"] = str(was) if was is not None else None
        if state is BackendState.FAILED:
            data["error"] = view.last_error
        self._announce(EventKind.BACKEND_STATE, view.backend_id, data)

    def _look_at_node(self) -> None:
        claims = self._claims()
        if claims is not self._claimed:
            state = NodeState.READY if claims else NodeState.DRAINING
            self._announce(EventKind.NODE_STATE, self._node.name, {"state": str(state)})
        self._claimed = claims

    def _look_at_holds(self, now: float) -> None:
        admission = self._node.admission
        holds = admission.hold_reasons if admission.waiting else ()
        if holds:
            self._held_last = now
            if self._held_since is None:
                self._held_since = now
                self._held = {"resource": holds[0].resource, "reason": holds[0].text}
                self._tell_of_hold({"state": "began", **self._held, "waiting": admission.waiting})
        elif self._held_since is not None and now - self._held_last >= CALM_SECONDS:
            seconds = round(self._held_last - self._held_since, 1)
            self._held_since = None
            self._tell_of_hold({"state": "ended", **self._held, "waiting": admission.waiting, "seconds": seconds})

    def _tell_of_hold(self, data: dict[str, JsonValue]) -> None:
        self._announce(EventKind.SANDBOX_HOLD, self._node.name, data)

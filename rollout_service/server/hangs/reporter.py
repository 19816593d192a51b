"""Reports hangs: an event, and a line of the log with the stack, for each beginning and each end.

Reporting waits for nothing; events are written in order in the background, or the last `MAX_EVENTS` wait for the store.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from functools import partial

import structlog
from pydantic import JsonValue

from api_schemas.events import EventKind
from api_schemas.views.hangs import HangFinding, HangVerdict
from rollout_service.base.signals import ResettableEvent
from rollout_service.server.hangs.heartbeat import BlockedLoop, lines_of
from rollout_service.server.hangs.problems import RUN, WEIGHTS
from rollout_service.store.contract import Store
from rollout_service.store.retrying import retry_until_stored

log = structlog.get_logger(__name__)

MAX_EVENTS = 256
LINES = {
    HangVerdict.STUCK: "rollouts are stuck",
    HangVerdict.IDLE: "rollouts are idle",
    HangVerdict.SLOW: "rollouts are slow",
    HangVerdict.HELD: "rollouts are held",
}
_LEFT_OUT = {"subject", "usual", "detail", "stack"}


class HangReporter:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._events: deque[tuple[EventKind, str, dict[str, JsonValue]]] = deque(maxlen=MAX_EVENTS)
        self._waiting = ResettableEvent()
        self._told_blocks: set[str] = set()

    def tell(self, kind: EventKind, finding: HangFinding) -> None:
        if finding.kind not in (RUN, WEIGHTS):  # whoever works on runs and engines logs their problems
            _log(kind, finding)
        self._record(kind, finding)

    def tell_of_blocks(self, blocks: list[BlockedLoop]) -> None:
        """Record blocks of the event loop that are over, each once; they are logged already."""
        for block in blocks:
            if block.finding_id not in self._told_blocks:
                self._record(EventKind.HANG_BEGAN, block.finding())
                self._record(EventKind.HANG_ENDED, block.finding())
        self._told_blocks = {block.finding_id for block in blocks}

    def _record(self, kind: EventKind, finding: HangFinding) -> None:
        data: dict[str, JsonValue] = finding.model_dump(mode="json", exclude=_LEFT_OUT)
        self._events.append((kind, finding.subject, data | {"at": str(datetime.now(UTC))}))
        self._waiting.set()

    async def write_events(self) -> None:
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            while self._events:
                # The store itself may be what hangs.
                await retry_until_stored("record a hang", partial(self._store.record, *self._events.popleft()))


def _log(kind: EventKind, finding: HangFinding) -> None:
    if kind is EventKind.HANG_ENDED:
        log.info("a hang has ended", finding_id=finding.finding_id, seconds=round(finding.seconds, 1))
        return
    write = log.warning if finding.verdict is HangVerdict.STUCK else log.info
    write(
        LINES[finding.verdict],
        finding_id=finding.finding_id,
        waits_for=finding.kind,
        subject=finding.subject,
        seconds=round(finding.seconds, 1),
        rollouts=finding.rollouts,
        count=finding.count,
        why=finding.message,
        hint=finding.hint,
        where=lines_of(finding.stack),
    )

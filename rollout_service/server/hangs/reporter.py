"""Reports hangs: an event, and a line of the log with the stack, for each beginning and each end.

Reporting waits for nothing; events are written in order in the background, or the last `MAX_EVENTS` wait for the store.
Problems that no step waits for are reported alike: runs that cannot go on or deliver nothing, and engines with
unexpected weights.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from functools import partial
from typing import Final

import structlog
from pydantic import JsonValue

from api_schemas.errors import ErrorInfo
from api_schemas.events import EventKind
from api_schemas.inference import BackendView
from api_schemas.runs import RunState
from api_schemas.views.hangs import HangFinding, HangVerdict
from rollout_service.base.signals import ResettableEvent
from rollout_service.engines.pool.backend_handle import OTHER_VERSION_HINT
from rollout_service.server.hangs.heartbeat import BlockedLoop, lines_of
from rollout_service.store.contract import Store
from rollout_service.store.retrying import retry_until_stored
from rollout_service.store.runs_contract import RunRecord

log = structlog.get_logger(__name__)

RUN: Final = "run"
WEIGHTS: Final = "weights"


def problem_of_run(run: RunRecord, problem: ErrorInfo) -> HangFinding:
    goes_on = run.state is RunState.RUNNING
    said = "delivers nothing, but goes on" if goes_on else "cannot go on"
    return HangFinding(
        finding_id="",
        verdict=HangVerdict.SLOW if goes_on else HangVerdict.STUCK,
        kind=RUN,
        subject=run.run_id,
        since=datetime.now(UTC),
        seconds=0.0,
        message=f"the run {run.run_id} {said}: {problem.message}",
        hint=problem.hint or "Resume it once that is mended, or end it.",
        detail={"code": problem.code, "boundary": problem.boundary},
    )


def problem_of_engine(view: BackendView) -> HangFinding:
    return HangFinding(
        finding_id="",
        verdict=HangVerdict.SLOW,
        kind=WEIGHTS,
        subject=view.backend_id,
        since=datetime.now(UTC),
        seconds=0.0,
        responds=True,
        message=f"the engine {view.backend_id} samples with version {view.sampled_version} of the weights, but was "
        f"given version {view.weight_version}",
        hint=OTHER_VERSION_HINT,
        detail={"pool": view.pool, "version": view.sampled_version, "given": view.weight_version},
    )


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

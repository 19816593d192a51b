"""A thread that sees when the event loop is blocked, and by what code, since nothing on the loop can.

While the loop is blocked for longer than `BLOCKED_SECONDS`, the last report, with the stack of the blocking code, is in
the state folder and is written anew every second. The thread waits for nothing that the loop has to do.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import structlog
from pydantic import ValidationError

from api_schemas.views.hangs import HangFinding, HangReport, HangVerdict, StackFrame
from rollout_service.base.private_files import write_private
from rollout_service.server.hangs.findings import culprit, new_finding_id, stack_of_thread, worst_first

# Kept in the state folder only while the service may be unable to answer over HTTP. Written whole or not at all, for
# its owner alone.

FILE = "hangs.json"
STACKS = "stacks.txt"
"""Python itself writes the stacks of all threads here at SIGUSR1, which works even if no Python code can run."""


class LastReport:
    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE
        self._is_written = True

    def write(self, report: HangReport | None) -> None:
        """Replace the report; a full disk must not end the watch."""
        if report is None:
            return
        try:
            write_private(self._path, report.model_dump_json().encode(), durable=False)  # a slow disk may be why
            self._is_written = True
        except OSError as error:
            log.warning("the report of what hangs cannot be written", error=str(error))

    def forget(self) -> None:
        """Remove the file; idempotent."""
        if self._is_written:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._is_written = False


def read_last_report(state_dir: Path) -> HangReport | None:
    try:
        report = HangReport.model_validate_json((state_dir / FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    return report.model_copy(update={"source": "state_folder"})


log = structlog.get_logger(__name__)

PERIOD_SECONDS = 0.25
BLOCKED_SECONDS = 1.0
LAG_SECONDS = 10.0
WRITE_SECONDS = 1.0
KEPT_BLOCKS = 20
JOIN_SECONDS = 0.04

EVENT_LOOP = "event_loop"


@dataclass(slots=True)
class BlockedLoop:
    """A time in which one piece of code kept the event loop."""

    began: float
    """By `time.perf_counter`."""
    since: datetime
    subject: str
    stack: list[StackFrame]
    rollout_id: str | None
    ended: float | None = None
    finding_id: str = field(default_factory=new_finding_id)

    @property
    def seconds(self) -> float:
        return (time.perf_counter() if self.ended is None else self.ended) - self.began

    def finding(self) -> HangFinding:
        took = "has kept" if self.ended is None else "kept"
        return HangFinding(
            finding_id=self.finding_id,
            verdict=HangVerdict.STUCK,
            kind=EVENT_LOOP,
            subject=self.subject,
            since=self.since,
            seconds=self.seconds,
            responds=self.ended is not None,
            rollouts=[] if self.rollout_id is None else [self.rollout_id],
            count=0 if self.rollout_id is None else 1,
            message=f"{self.subject} {took} the event loop for {self.seconds:.1f} s, and everything else waiting",
            hint="Code of the service and of its environments must not block: let it await, or run it in a thread "
            "(anyio.to_thread.run_sync). The stack shows the line.",
            stack=self.stack,
        )


class LoopHeartbeat:
    def __init__(self, last_report: LastReport, find_rollout: Callable[[object], str | None]) -> None:
        """`find_rollout` returns the rollout of a task; the thread calls it."""
        self._last_report = last_report
        self._find_rollout = find_rollout
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._ending = threading.Event()
        self._lags: deque[tuple[float, float]] = deque()
        self._sent: float | None = None
        self._current: BlockedLoop | None = None
        self._ended: deque[BlockedLoop] = deque(maxlen=KEPT_BLOCKS)
        self.report: HangReport | None = None
        """Set by the watch; the thread adds the blocked loop."""

    @contextmanager
    def running(self) -> Iterator[None]:
        self._last_report.forget()  # a service that was killed may have left one
        thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ending.set()
            thread.join(JOIN_SECONDS)
            self._last_report.forget()

    @property
    def lag(self) -> float:
        """The greatest delay of the event loop within `LAG_SECONDS`."""
        now = time.perf_counter()
        sent = self._sent
        lags = [lag for at, lag in tuple(self._lags) if at > now - LAG_SECONDS]
        return max(lags, default=0.0) if sent is None else max([now - sent, *lags])

    def recent(self) -> list[BlockedLoop]:
        """Return the blocks that ended within `LAG_SECONDS`; called on the loop."""
        now = time.perf_counter()
        return [one for one in tuple(self._ended) if one.ended is not None and one.ended > now - LAG_SECONDS]

    def _beat(self) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        now = time.perf_counter()
        self._lags.append((now, now - sent))
        while self._lags and self._lags[0][0] < now - LAG_SECONDS:
            self._lags.popleft()
        if (current := self._current) is not None and current.ended is None:
            current.ended = now

    def _watch(self) -> None:
        written_at = 0.0
        while not self._ending.wait(PERIOD_SECONDS):
            sent = self._sent
            if sent is None:
                self._settle()
                self._sent = time.perf_counter()
                try:
                    self._loop.call_soon_threadsafe(self._beat)
                except RuntimeError:  # the loop is closed
                    return
            elif time.perf_counter() - sent > BLOCKED_SECONDS:
                self._look(sent)
                if time.perf_counter() - written_at >= WRITE_SECONDS and not self._ending.is_set():
                    written_at = time.perf_counter()
                    self._last_report.write(self._whole_report())

    def _settle(self) -> None:
        if (current := self._current) is not None and current.ended is not None:
            self._current = None
            self._ended.append(current)
            self._last_report.forget()
            log.warning("the event loop runs again", subject=current.subject, seconds=round(current.seconds, 3))

    def _look(self, sent: float) -> None:
        if self._current is not None:
            return
        frame = sys._current_frames().get(self._loop_thread)
        found = culprit(frame)
        lag = time.perf_counter() - sent
        current = BlockedLoop(
            began=sent,
            since=datetime.fromtimestamp(time.time() - lag, UTC),
            subject="unknown code" if found is None else f"{found.function} ({found.file}:{found.line})",
            stack=stack_of_thread(frame),
            rollout_id=self._find_rollout(asyncio.current_task(self._loop)),
        )
        del frame
        self._current = current
        finding = current.finding()
        log.error(
            "the event loop is blocked",
            finding_id=current.finding_id,
            subject=current.subject,
            rollout_id=current.rollout_id,
            hint=finding.hint,
            where=lines_of(current.stack),
        )

    def _whole_report(self) -> HangReport | None:
        if self.report is None or (current := self._current) is None:
            return self.report
        findings = worst_first([current.finding(), *self.report.findings])
        return self.report.model_copy(
            update={"findings": findings, "loop_lag_seconds": self.lag, "at": datetime.now(UTC)}
        )


def lines_of(stack: list[StackFrame]) -> list[str]:
    return [f"{frame.file}:{frame.line} {frame.function}" for frame in stack]

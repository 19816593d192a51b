"""The steps of rollouts under way, noted at each boundary for timelines, traces and the search for hangs.

`waits_for` costs microseconds, never fails, and does nothing outside of an attempt. A step ends with its block, however
that is left, so no step outlives what it describes. An attempt keeps at most `MAX_STEPS` ended steps; more are counted
and dropped.

The current attempt is a context variable, which tasks inherit from the task that starts them. A callback that serves an
attempt from another task, such as a request of a black-box agent, enters it with `Activity.entered`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from api_schemas.base import TraceContext
from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from rollout_service.base.errors import describe

if TYPE_CHECKING:
    import anyio

    from sandboxes import Sandbox

MAX_STEPS = 4_096

_CURRENT: ContextVar[Activity | None] = ContextVar("activity", default=None)
_LANE: ContextVar[str] = ContextVar("lane", default="")
_NOTES: ContextVar[dict[str, Any] | None] = ContextVar("notes", default=None)


class StepObserver:
    """An observer of attempts and their steps, called on the event loop. It must be quick and must not raise.

    Every method does nothing by default.
    """

    def began(self, activity: Activity) -> None: ...

    def opened(self, activity: Activity, step: OpenStep) -> None: ...

    def closed(self, activity: Activity, step: OpenStep) -> None:
        """Note a step that has ended; `ended` and `error` are set."""

    def finished(self, activity: Activity) -> None: ...


@dataclass(eq=False, repr=False, slots=True)
class OpenStep:
    """A step that has begun. Times are on `time.perf_counter`."""

    kind: StepKind
    name: str
    lane: str
    stage: Stage | None
    detail: dict[str, Any]
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    """The task that waits, whose stack tells where."""
    limit: float | None = None
    """The seconds after which it is to end, if it has a limit of its own."""
    sandbox: Sandbox | None = None
    """The sandbox that works on it, until it has ended."""
    started: float = field(default_factory=time.perf_counter)
    moved: float | None = None
    """When something last moved, such as a token that arrived."""
    ended: float | None = None
    error: str | None = None
    traceparent: str | None = None
    """The step as a span, for those who are asked to continue its trace; None if there is no trace."""
    request: object = None
    """The request, as an object, until the step has ended; observers may read it."""
    answer: object = None
    """The answer, likewise."""

    def move(self, **detail: Any) -> None:
        """Note progress, with new details."""
        self.moved = time.perf_counter()
        self.detail.update(detail)

    def note(self, **detail: Any) -> None:
        """Note new details; this is no progress."""
        self.detail.update(detail)


@dataclass(eq=False, repr=False, slots=True)
class Activity:
    """The record of one attempt, which begins as it is made. Times are on `time.perf_counter`."""

    rollout_id: str
    _: KW_ONLY
    attempt: int
    environment: str
    run_id: str | None = None
    group: int | None = None
    trace: TraceContext | None = None
    """The caller's span, if it sent one."""
    observers: tuple[StepObserver, ...] = ()
    trace_id: str | None = None
    """The id of the attempt's trace, if it is traced."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """How it ended, once it is settled: `state`, and `reward`, `stop_reason` and `code` if there are any."""
    stage: Stage | None = None
    """The stage that the attempt is in, or waits for; None before the first."""
    stage_since: float = 0.0
    """When it came to that stage."""
    stages: list[tuple[Stage, float]] = field(default_factory=list)
    """All stages that it came to so far, with that time."""
    working_since: float | None = None
    """When its work in the stage began; None while it waits for a worker."""
    limit_seconds: float | None = None
    """The limit of the stage that it works in."""
    limit: anyio.CancelScope | None = None
    """The scope whose deadline ends the work in the stage."""
    sandbox: Sandbox | None = None
    """The sandbox that is open for it."""
    moved: float | None = None
    """When a step last ended."""
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    started: float = field(default_factory=time.perf_counter)
    started_at: float = field(default_factory=time.time)
    """The same moment as Unix time."""
    finished: float | None = None
    """When the attempt ended; None while it lasts."""
    open: list[OpenStep] = field(default_factory=list)
    """The steps that have not ended, in the order in which they began."""
    ended: list[OpenStep] = field(default_factory=list)
    dropped: int = 0
    """Ended steps that were not kept."""

    def enter_stage(self, stage: Stage) -> None:
        """Note that the attempt is in a stage from now on, or waits for it."""
        self.stage, self.stage_since = stage, time.perf_counter()
        self.stages.append((stage, self.stage_since))

    @contextmanager
    def entered(self) -> Iterator[None]:
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    @contextmanager
    def working(self, seconds: float, limit: anyio.CancelScope) -> Iterator[None]:
        """Note within the block that it works in a stage, under this limit."""
        self.working_since, self.limit_seconds, self.limit = time.perf_counter(), seconds, limit
        try:
            yield
        finally:
            self.working_since = self.limit_seconds = self.limit = None

    def begin(self, step: OpenStep) -> None:
        self.open.append(step)
        for observer in self.observers:
            observer.opened(self, step)

    def end(self, step: OpenStep, error: BaseException | None) -> None:
        step.ended = self.moved = time.perf_counter()
        step.task = None
        if error is not None:
            step.error = _code(error)
        self.open.remove(step)
        if len(self.ended) < MAX_STEPS:
            self.ended.append(step)
        else:
            self.dropped += 1
        for observer in self.observers:
            observer.closed(self, step)
        step.request = step.answer = step.sandbox = None


class waits_for:  # noqa: N801 - a context manager that reads like a statement
    """Note a step of the current attempt within the block; yields the step, for noting progress."""

    __slots__ = ("_activity", "_step")

    def __init__(self, kind: StepKind, name: str = "", **detail: Any) -> None:
        self._activity = activity = _CURRENT.get()
        stage = None if activity is None else activity.stage
        if (notes := _NOTES.get()) is not None:
            detail = notes | detail
        self._step = OpenStep(kind, name, _LANE.get(), stage, detail)

    def __enter__(self) -> OpenStep:
        if self._activity is not None:
            self._activity.begin(self._step)
        return self._step

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._activity is not None:
            self._activity.end(self._step, error)


@contextmanager
def in_lane(lane: str) -> Iterator[None]:
    outer = _LANE.get()
    token = _LANE.set(f"{outer}/{lane}" if outer else lane)
    try:
        yield
    finally:
        _LANE.reset(token)


def note_outcome(**outcome: Any) -> None:
    """Note how the current attempt ended; None is left out, and nothing happens outside of an attempt."""
    if (activity := _CURRENT.get()) is not None:
        activity.outcome = {name: value for name, value in outcome.items() if value is not None}


@contextmanager
def noting(**detail: Any) -> Iterator[None]:
    """Add this detail to all steps that begin within the block."""
    token = _NOTES.set((_NOTES.get() or {}) | detail)
    try:
        yield
    finally:
        _NOTES.reset(token)


def current_lane() -> str:
    return _LANE.get()


def current_activity() -> Activity | None:
    return _CURRENT.get()


def current_step() -> OpenStep | None:
    """Return the innermost open step of this task."""
    activity, task = _CURRENT.get(), asyncio.current_task()
    steps = () if activity is None else reversed(activity.open)
    return next((step for step in steps if step.task is task), None)


def _code(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return describe(error).code if isinstance(error, Exception) else type(error).__name__


class ActivityBoard:
    """All attempts under way at this node, each exactly as long as its block lasts."""

    def __init__(self) -> None:
        self._observers: tuple[StepObserver, ...] = ()
        self._active: dict[str, Activity] = {}

    def observe(self, observer: StepObserver) -> None:
        """Tell an observer of all attempts that begin from now on."""
        self._observers += (observer,)

    @contextmanager
    def working(
        self,
        rollout_id: str,
        *,
        attempt: int,
        environment: str,
        run_id: str | None = None,
        group: int | None = None,
        trace: TraceContext | None = None,
    ) -> Iterator[Activity]:
        """Put an attempt on the board within the block, as the current activity."""
        activity = Activity(
            rollout_id,
            attempt=attempt,
            environment=environment,
            run_id=run_id,
            group=group,
            trace=trace,
            observers=self._observers,
        )
        self._active[rollout_id] = activity
        for observer in self._observers:
            observer.began(activity)
        try:
            with activity.entered():
                yield activity
        finally:
            if self._active.get(rollout_id) is activity:
                del self._active[rollout_id]
            activity.finished = time.perf_counter()
            for observer in self._observers:
                observer.finished(activity)

    def find(self, rollout_id: str) -> Activity | None:
        return self._active.get(rollout_id)

    def all(self) -> list[Activity]:
        """Return all activities, the oldest first."""
        return list(self._active.values())

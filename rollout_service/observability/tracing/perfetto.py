"""A trace of rollouts, made one rollout at a time.

A rollout's slices are in threads of one lane, which no other rollout has meanwhile; in each thread they lie within each
other or apart. A rollout leaves only some bytes in memory for each of its engine calls.

The processes are `rollouts`, `engines` and `sandboxes`. A rollout contains its stages, which contain its steps; steps
at the same time are in further threads of its lane. Arrows lead from a turn to the slot of its engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from pydantic import JsonValue

from api_schemas.events import Event
from api_schemas.rollouts.steps import AttemptSteps, RolloutAttempts, StepKind
from rollout_service.observability.tracing.perfetto_events import (
    COUNTER_POINTS,
    ENGINES,
    ROLLOUTS,
    SANDBOXES,
    SECOND,
    UNKNOWN,
    EngineCalls,
    TraceEvents,
    WeightUpdates,
    Write,
)

SHORTEST_WAIT = 100
"""Shorter waits, in microseconds, are left out: the thing waited for was free."""
_WAITS = frozenset({StepKind.PLACE, StepKind.WORKER, StepKind.HOST, StepKind.STORE, StepKind.POOL_QUEUE})
_EXTRAS_PER_LANE = 1_000
REQUEST_CHARS = 8
"""Enough of a request's id to find it in the engine's log."""
COMMAND_CHARS = 80
_ENGINE_ARGS = {
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "tokens": "tokens",
    "version": "version",
    "request": "request",
    "error": "error",
}
_LEFT_OUT = frozenset({"call", "sandbox", "turn", "segment"})
"""Other slices of the trace show these details."""
_NAMES = {
    StepKind.PLACE: "wait: place",
    StepKind.WORKER: "wait: worker",
    StepKind.HOST: "wait: host",
    StepKind.POOL_QUEUE: "wait: pool",
    StepKind.PAUSED_POOL: "wait: paused pool",
    StepKind.SUBAGENT: "wait: sub-agent's slot",
    StepKind.SANDBOX_START: "start sandbox",
    StepKind.SANDBOX_END: "end sandbox",
}
_PREFIXED = frozenset(
    {StepKind.STORE, StepKind.GRADER, StepKind.JUDGE, StepKind.ARTIFACTS, StepKind.AGENT, StepKind.SESSION}
)


class RolloutTrace:
    def __init__(self, write: Write, *, began: float) -> None:
        """`write` gets each piece of the file; `began` is the zero of its time line, in Unix seconds."""
        self._began = began
        self._events = TraceEvents(write)
        self._lanes, self._sandbox_lanes = Lanes(), Lanes()
        self._threads: dict[tuple[int, int], int] = {}
        self._calls = EngineCalls()
        self._weights = WeightUpdates()
        self._spans: list[tuple[int, int]] = []
        self.rollouts = 0
        processes = {ROLLOUTS: "rollouts", ENGINES: "engines", SANDBOXES: "sandboxes"}
        for order, (pid, name) in enumerate(processes.items()):
            self._events.process(pid, name, order)

    @property
    def events(self) -> int:
        return self._events.count

    def add(self, rollout: RolloutAttempts) -> None:
        self.rollouts += 1
        self._calls.begin_rollout(rollout.rollout_id)
        for attempt in rollout.attempts:
            more = "" if attempt.attempt == 1 else f" attempt {attempt.attempt}"
            self._add_attempt(f"{rollout.rollout_id}{more}", attempt)

    def end(self, updates: Iterable[Event] = ()) -> None:
        """Add engines, updates of their weights from events, and counters, and end the file."""
        self._calls.write(self._events)
        if self._spans:
            within = min(start for start, _ in self._spans), max(end for _, end in self._spans)
            self._weights.write(self._events, updates, began=self._began, within=within)
            self._count_rollouts(*within)
        self._events.end()

    def _add_attempt(self, name: str, attempt: AttemptSteps) -> None:
        start = round((attempt.started_at - self._began) * 1e6)
        ends = [at + length for at, length in zip(attempt.starts, attempt.lengths, strict=True)]
        end = start + max(attempt.us, *ends, *(at for _, at in attempt.stages), 0)
        self._spans.append((start, end))
        lane = self._lanes.take(start, end)
        _AttemptSlices(self, lane, start, end, attempt).add(name)

    def thread(self, lane: int, extra: int) -> int:
        name = f"lane {lane + 1}" if not extra else f"lane {lane + 1}, beside {extra}"
        return self._thread(ROLLOUTS, name, lane * _EXTRAS_PER_LANE + extra)

    def _thread(self, pid: int, name: str, order: int) -> int:
        if (pid, order) not in self._threads:
            self._threads[pid, order] = self._events.thread(pid, name, order)
        return self._threads[pid, order]

    def slice(self, tid: int, start: int, end: int, name: str, args: dict[str, JsonValue] | None = None) -> None:
        self._events.slice(ROLLOUTS, tid, start, end - start, name, args)

    def engine_call(self, tid: int, start: int, end: int, name: str, detail: dict[str, JsonValue]) -> None:
        turn_number, tokens = _number(detail, "turn", UNKNOWN), _number(detail, "tokens", 0)
        call = self._calls.add(name, start, end - start, turn=turn_number, tokens=tokens)
        if (version := _number(detail, "version", UNKNOWN)) != UNKNOWN:
            self._weights.sampled(name, version, start)
        args = {_ENGINE_ARGS[key]: value for key, value in detail.items() if key in _ENGINE_ARGS}
        if isinstance(request := args.get("request"), str):
            args["request"] = request[:REQUEST_CHARS]
        turn = detail.get("turn")
        shown = name if turn is None else f"turn {turn}"
        self._events.slice(ROLLOUTS, tid, start, end - start, shown, args, arrow=call + 1)

    def sandbox(self, name: str, started: tuple[int, int], ended: tuple[int, int]) -> None:
        """Add a sandbox, from the beginning of its start to the end of its end."""
        if ended[0] < started[1]:
            ended = (max(started[1], ended[1]),) * 2
        lane = self._sandbox_lanes.take(started[0], ended[1])
        tid = self._thread(SANDBOXES, f"sandbox lane {lane + 1}", lane)
        self._events.slice(SANDBOXES, tid, started[0], ended[1] - started[0], name)
        self._events.slice(SANDBOXES, tid, started[0], started[1] - started[0], "start")
        if ended[1] > ended[0]:
            self._events.slice(SANDBOXES, tid, ended[0], ended[1] - ended[0], "end")

    def _count_rollouts(self, first: int, last: int) -> None:
        width = max(SECOND // 10, -(-(last - first) // COUNTER_POINTS))
        changes = [0] * ((last - first) // width + 3)
        for start, end in self._spans:
            changes[(start - first) // width] += 1
            changes[(end - first) // width + 1] -= 1
        for number, value in enumerate(accumulate(changes)):
            self._events.counter(ROLLOUTS, first + number * width, "rollouts", "at work", value)


class _AttemptSlices:
    def __init__(self, trace: RolloutTrace, lane: int, start: int, end: int, attempt: AttemptSteps) -> None:
        self._trace = trace
        self._lane = lane
        self._start, self._end = start, end
        self._attempt = attempt
        self._extra_ends: list[int] = []
        """When the last slice of each further thread ends."""

    def add(self, name: str) -> None:
        tid, main = self._trace.thread(self._lane, 0), Nesting()
        main.fit(self._start, self._end)
        self._trace.slice(tid, self._start, self._end, name, _args_of(self._attempt))
        lanes = self._steps_by_lane()
        stages = list(self._stages())
        for number in lanes.pop("", []):
            start, end = self._times(number)
            while stages and stages[0][1] <= start:
                self._add_stage(tid, main, *stages.pop(0))
            if (fitting := main.fit(start, end)) is None:
                self._add_beside("", [number])
            else:
                self._add_step(tid, number, *fitting)
        for stage in stages:
            self._add_stage(tid, main, *stage)
        for lane, numbers in sorted(lanes.items(), key=lambda one: self._times(one[1][0])):
            self._add_beside(lane, numbers)
        self._add_sandboxes()

    def _steps_by_lane(self) -> dict[str, list[int]]:
        attempt, lanes = self._attempt, dict[str, list[int]]()
        for number, kind in enumerate(attempt.kinds):
            if kind in _WAITS and attempt.lengths[number] < SHORTEST_WAIT:
                continue
            lanes.setdefault(attempt.lanes[number] if attempt.lanes else "", []).append(number)
        for numbers in lanes.values():
            numbers.sort(key=lambda number: (attempt.starts[number], -attempt.lengths[number]))
        return lanes

    def _stages(self) -> Iterator[tuple[str, int, int]]:
        stages = self._attempt.stages
        for number, (stage, at) in enumerate(stages):
            end = self._start + stages[number + 1][1] if number + 1 < len(stages) else self._end
            yield stage.value, self._start + at, end

    def _add_stage(self, tid: int, main: Nesting, stage: str, start: int, end: int) -> None:
        if (fitting := main.fit(start, end)) is not None:
            self._trace.slice(tid, *fitting, stage)

    def _add_beside(self, lane: str, numbers: Sequence[int]) -> None:
        """Add the steps of a lane to a free thread; a slice around them groups several."""
        times = [self._times(number) for number in numbers]
        start, end = times[0][0], max(end for _, end in times)
        extra = next((n for n, last in enumerate(self._extra_ends) if last <= start), len(self._extra_ends))
        self._extra_ends[extra : extra + 1] = [end]
        tid, nesting = self._trace.thread(self._lane, extra + 1), Nesting()
        if len(numbers) > 1:
            nesting.fit(start, end)
            self._trace.slice(tid, start, end, f"sub-agent {lane}" if lane.isdecimal() else lane)
        for number in numbers:
            if (fitting := nesting.fit(*self._times(number))) is None:
                self._add_beside(lane, [number])
            else:
                self._add_step(tid, number, *fitting)

    def _add_step(self, tid: int, number: int, start: int, end: int) -> None:
        attempt = self._attempt
        kind, name, detail = attempt.kinds[number], attempt.names[number], attempt.details[number]
        if attempt.errors and (error := attempt.errors[number]) is not None:
            detail = detail | {"error": error}
        if kind is StepKind.ENGINE:
            self._trace.engine_call(tid, start, end, name, detail)
            return
        shown = _NAMES.get(kind) or (f"{kind}: {name}" if kind in _PREFIXED and name else name or kind.value)
        args = {key: value for key, value in detail.items() if key not in _LEFT_OUT}
        if isinstance(command := args.get("command"), str):
            args["command"] = command[:COMMAND_CHARS]
        self._trace.slice(tid, start, end, shown, args)

    def _add_sandboxes(self) -> None:
        attempt, started = self._attempt, dict[str, tuple[int, int]]()
        for number, kind in enumerate(attempt.kinds):
            name = attempt.details[number].get("sandbox")
            if not isinstance(name, str):
                continue
            if kind is StepKind.SANDBOX_START:
                started[name] = self._times(number)
            elif kind is StepKind.SANDBOX_END and name in started:
                self._trace.sandbox(name, started.pop(name), self._times(number))
        for name, times in started.items():
            self._trace.sandbox(name, times, (self._end, max(self._end, times[1])))

    def _times(self, number: int) -> tuple[int, int]:
        start = self._start + self._attempt.starts[number]
        return start, start + self._attempt.lengths[number]


def _args_of(attempt: AttemptSteps) -> dict[str, JsonValue]:
    of_run: dict[str, JsonValue] = {} if attempt.run_id is None else {"run": attempt.run_id, "group": attempt.group}
    return {"environment": attempt.environment} | of_run | attempt.outcome


def _number(detail: dict[str, JsonValue], name: str, default: int) -> int:
    value = detail.get(name)
    return value if isinstance(value, int) else default


# Two clocks rounded the times to microseconds, so ends and beginnings may miss each other by `SLACK`.

SLACK = 2


class Lanes:
    """Lanes whose intervals do not overlap. They may come in any order; in order of time they need little work."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        """By lane, the end of its last interval."""
        self._taken: list[list[tuple[int, int]]] = []
        """By lane, its intervals in order."""

    def take(self, start: int, end: int) -> int:
        """Occupy a free lane, and return its number."""
        for number, last in enumerate(self._ends):
            if last <= start:
                self._taken[number].append((start, end))
                self._ends[number] = end
                return number
        for number, taken in enumerate(self._taken):
            at = bisect_right(taken, (start, end))
            if (at == 0 or taken[at - 1][1] <= start) and (at == len(taken) or end <= taken[at][0]):
                taken.insert(at, (start, end))
                self._ends[number] = max(self._ends[number], end)
                return number
        self._taken.append([(start, end)])
        self._ends.append(end)
        return len(self._ends) - 1


class Nesting:
    """One lane whose intervals come in the order in which they begin, and lie within each other."""

    def __init__(self) -> None:
        self._open: list[int] = []
        """The ends of the open intervals, the innermost last."""
        self._reached = 0

    def fit(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the interval, moved by no more than `SLACK` if that makes it fit; None if it does not fit."""
        while self._open and self._open[-1] <= start + SLACK:
            self._reached = max(self._reached, self._open.pop())
        start = max(start, self._reached)
        end = max(start, end)
        if self._open and end > self._open[-1]:
            if end > self._open[-1] + SLACK:
                return None
            end = max(start, self._open[-1])
        self._open.append(end)
        return start, end

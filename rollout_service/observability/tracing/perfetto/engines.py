"""The engines' side of a trace: their slots, and how many tokens they sampled.

A call is remembered in 32 bytes until the end, since only then is it known which slots of an engine are free.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

from rollout_service.observability.tracing.perfetto.events import ENGINES, TraceEvents

SECOND = 1_000_000
COUNTER_POINTS = 2_000
"""The most values of a counter."""
UNKNOWN = -1


class EngineCalls:
    """The calls of all engines."""

    def __init__(self) -> None:
        self._engines: dict[str, int] = {}
        self._rollouts: list[str] = []
        self._starts, self._lengths = array("q"), array("q")
        self._engine, self._rollout = array("i"), array("i")
        self._turn, self._tokens = array("i"), array("i")

    def __len__(self) -> int:
        return len(self._starts)

    def begin_rollout(self, rollout_id: str) -> None:
        """Set the rollout that makes the calls added from now on."""
        self._rollouts.append(rollout_id)

    def add(self, engine: str, start: int, length: int, *, turn: int = UNKNOWN, tokens: int = 0) -> int:
        """Add a call; return its number."""
        self._starts.append(start)
        self._lengths.append(length)
        self._engine.append(self._engines.setdefault(engine, len(self._engines)))
        self._rollout.append(len(self._rollouts) - 1)
        self._turn.append(turn)
        self._tokens.append(tokens)
        return len(self._starts) - 1

    def write(self, events: TraceEvents) -> None:
        """Add all calls, each in the first free slot of its engine, with the arrow that ends there."""
        slots = [_Slots(events, name, number) for name, number in self._engines.items()]
        for call in sorted(range(len(self)), key=self._starts.__getitem__):
            start, length, engine = self._starts[call], self._lengths[call], self._engine[call]
            tid = slots[engine].take(start, start + length)
            turn = f" #{self._turn[call]}" if self._turn[call] != UNKNOWN else ""
            name = f"{self._rollouts[self._rollout[call]]}{turn}"
            events.slice(ENGINES, tid, start, length, name, arrow=call + 1, arrow_ends=True)
        self._count_tokens(events)

    def _count_tokens(self, events: TraceEvents) -> None:
        """Add the counter of sampled tokens, each call's spread evenly over its time."""
        if not len(self):
            return
        first = min(self._starts)
        last = max(start + length for start, length in zip(self._starts, self._lengths, strict=True))
        width = max(SECOND, -(-(last - first) // COUNTER_POINTS))
        sums = [0.0] * ((last - first) // width + 1)
        for start, length, tokens in zip(self._starts, self._lengths, self._tokens, strict=True):
            begin, end = start - first, start - first + max(length, 1)
            for number in range(begin // width, (end - 1) // width + 1):
                inside = min(end, (number + 1) * width) - max(begin, number * width)
                sums[min(number, len(sums) - 1)] += tokens * inside / (end - begin)
        for number, total in enumerate(sums):
            events.counter(
                ENGINES, first + number * width, "tokens", "per second", round(total * SECOND / width, 1)
            )
        events.counter(ENGINES, first + len(sums) * width, "tokens", "per second", 0)


class _Slots:
    """The slots of one engine, for calls in the order in which they begin."""

    def __init__(self, events: TraceEvents, name: str, number: int) -> None:
        self._events = events
        self._name = name
        self._order = number * 100_000
        self._threads: list[int] = []
        self._busy: list[tuple[int, int]] = []
        """The ends and numbers of the slots in use."""
        self._free: list[int] = []

    def take(self, start: int, end: int) -> int:
        """Return the thread of the first free slot."""
        while self._busy and self._busy[0][0] <= start:
            heappush(self._free, heappop(self._busy)[1])
        slot = heappop(self._free) if self._free else self._new()
        heappush(self._busy, (end, slot))
        return self._threads[slot]

    def _new(self) -> int:
        slot = len(self._threads)
        name = f"{self._name} slot {slot + 1}"
        self._threads.append(self._events.thread(ENGINES, name, self._order + slot))
        return slot

"""The events of a trace, in the JSON that Chrome's tracing defined and Perfetto reads, and the engines' side of one.

The output is a whole JSON document once `end` was called, whatever the names contain. Threads are numbered from 1000
over all processes, because Perfetto takes a thread with the number of its process for the main one. A call of an engine
is kept in 32 bytes until the end, since only then is it known which slots of the engine are free.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from heapq import heappop, heappush

from pydantic import JsonValue
from pydantic_core import to_json

from api_schemas.events import Event

ROLLOUTS, ENGINES, SANDBOXES = 1, 2, 3
FIRST_THREAD = 1_000
FLUSH_EVENTS = 2_000

Write = Callable[[bytes], object]


@lru_cache(maxsize=4_096)
def quoted(text: str) -> str:
    return to_json(text).decode()


class TraceEvents:
    """The events of one trace. Times and lengths are whole microseconds."""

    def __init__(self, write: Write) -> None:
        """`write` gets each piece of the file."""
        self._write = write
        self._events: list[str] = []
        self._next_thread = FIRST_THREAD
        write(b'{"displayTimeUnit":"ms","traceEvents":[')
        self._is_first = True
        self.count = 0

    def process(self, pid: int, name: str, order: int) -> None:
        """Name a process; `order` is its place on the page."""
        self._add(f'{{"ph":"M","pid":{pid},"name":"process_name","args":{{"name":{quoted(name)}}}}}')
        self._add(f'{{"ph":"M","pid":{pid},"name":"process_sort_index","args":{{"sort_index":{order}}}}}')

    def thread(self, pid: int, name: str, order: int) -> int:
        tid, self._next_thread = self._next_thread, self._next_thread + 1
        of = f'"ph":"M","pid":{pid},"tid":{tid}'
        self._add(f'{{{of},"name":"thread_name","args":{{"name":{quoted(name)}}}}}')
        self._add(f'{{{of},"name":"thread_sort_index","args":{{"sort_index":{order}}}}}')
        return tid

    def slice(
        self,
        pid: int,
        tid: int,
        start: int,
        length: int,
        name: str,
        args: Mapping[str, JsonValue] | None = None,
        *,
        arrow: int | None = None,
        arrow_ends: bool = False,
    ) -> None:
        """Add something that took time, before events inside it; `arrow` begins here, or ends if `arrow_ends`."""
        said = f',"args":{to_json(args).decode()}' if args else ""
        if arrow is not None:
            said += f',"bind_id":{arrow},"flow_{"in" if arrow_ends else "out"}":true'
        self._add(f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":{start},"dur":{length},"name":{quoted(name)}{said}}}')

    def mark(self, pid: int, tid: int, at: int, name: str) -> None:
        self._add(f'{{"ph":"i","s":"t","pid":{pid},"tid":{tid},"ts":{at},"name":{quoted(name)}}}')

    def counter(self, pid: int, at: int, name: str, series: str, value: float) -> None:
        """Add a counter's value from a moment on; it is shown by both names."""
        said = f'"args":{{{quoted(series)}:{value:g}}}'
        self._add(f'{{"ph":"C","pid":{pid},"ts":{at},"name":{quoted(name)},{said}}}')

    def end(self) -> None:
        self._flush()
        self._write(b"]}\n")

    def _add(self, event: str) -> None:
        self._events.append(event)
        self.count += 1
        if len(self._events) >= FLUSH_EVENTS:
            self._flush()

    def _flush(self) -> None:
        if self._events:
            lead = "" if self._is_first else ",\n"
            self._write((lead + ",".join(self._events)).encode())
            self._is_first = False
            self._events.clear()


SECOND = 1_000_000
COUNTER_POINTS = 2_000
UNKNOWN = -1


class EngineCalls:
    def __init__(self) -> None:
        self._engines: dict[str, int] = {}
        self._rollouts: list[str] = []
        self._starts, self._lengths = array("q"), array("q")
        self._engine, self._rollout = array("i"), array("i")
        self._turn, self._tokens = array("i"), array("i")

    def __len__(self) -> int:
        return len(self._starts)

    def begin_rollout(self, rollout_id: str) -> None:
        self._rollouts.append(rollout_id)

    def add(self, engine: str, start: int, length: int, *, turn: int = UNKNOWN, tokens: int = 0) -> int:
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
        """Spread the tokens of each call evenly over its time."""
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
            events.counter(ENGINES, first + number * width, "tokens", "per second", round(total * SECOND / width, 1))
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


class WeightUpdates:
    """The versions that sampled the pools' tokens, and the events about their updates.

    An update with an event is a slice; without, a mark where the first tokens of its version began.
    """

    def __init__(self) -> None:
        self._sampled: dict[str, dict[int, int]] = {}
        """By pool and version, when the first call that sampled tokens of it began."""

    def sampled(self, engine: str, version: int, at: int) -> None:
        versions = self._sampled.setdefault(engine.partition("@")[0], {})
        versions[version] = min(at, versions.get(version, at))

    def write(self, events: TraceEvents, told: Iterable[Event], *, began: float, within: tuple[int, int]) -> None:
        """Add the updates of these pools; those of events only within an interval of the time line."""
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
    """Yield beginnings and ends, without overlaps from rounded times."""
    reached = round(-began * 1e6)  # 1970
    for event in updates:
        end = max(round((event.time.timestamp() - began) * 1e6), reached)
        seconds = event.data.get("seconds")
        length = round(seconds * 1e6) if isinstance(seconds, int | float) else 0
        yield max(end - length, reached), end, event
        reached = end

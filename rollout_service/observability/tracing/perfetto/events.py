"""Writes trace events as they come, in the JSON that Chrome's tracing defined and Perfetto reads.

The output is a whole JSON document once `end` was called, whatever the names contain. Threads are numbered from 1000
over all processes, because Perfetto takes a thread with the number of its process for the main one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from pydantic import JsonValue
from pydantic_core import to_json

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

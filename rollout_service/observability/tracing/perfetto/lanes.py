"""Puts intervals of time into lanes, so that those of one lane do not overlap, or lie within each other.

Times are whole microseconds. Two clocks rounded them, so ends and beginnings may miss each other by `SLACK`.
"""

from __future__ import annotations

from bisect import bisect_right

SLACK = 2


class Lanes:
    """Lanes whose intervals do not overlap. They may come in any order; in that of time, they need little work."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        """By lane, the end of its last interval."""
        self._taken: list[list[tuple[int, int]]] = []
        """By lane, its intervals in order."""

    def take(self, start: int, end: int) -> int:
        """Return the number of a lane that is free for this interval, and take it."""
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
        """The ends of the intervals that are open, the innermost last."""
        self._reached = 0

    def fit(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the interval, moved by no more than `SLACK` if that makes it fit; None if it does not."""
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

"""The speed of an engine, learned from its answers.

The time of an answer is taken as `uncached prompt tokens * prefill + sampled tokens * (decode + others * crowding)`,
where the others are the requests that ran at the same time: without them a busy engine would be taken for a slow one.

The first answers scale all rates alike, by the mean of the logarithms of their errors. From then on an error changes
each rate in proportion to its part in the expected time (an exponentiated gradient): rates stay positive, no unit has
to be chosen, and answers that are nearly all sampling hardly change the prefill rate. An error counts up to a bound, so
one answer that waited for a compilation changes little.
"""

from dataclasses import dataclass
from math import exp, log

_SCALED = 8
"""The number of first answers that scale all rates alike."""
_STEP = 0.05
"""The fraction of an error that a later answer corrects."""
_LARGEST_ERROR = 1.0
"""The largest error that counts, as a logarithm: a factor of e."""
_SHORTEST = 1e-6
"""The shortest time that counts, in seconds."""


@dataclass(slots=True)
class Rates:
    """The seconds per token of one engine; the initial values are a guess."""

    prefill: float = 1e-4
    """Seconds per prompt token that is not cached."""
    decode: float = 1e-2
    """Seconds per sampled token of a request that runs alone."""
    crowding: float = 3e-4
    """Seconds that each other request adds to a sampled token."""
    answers: int = 0
    """How many answers the rates were learned from."""

    def expected(self, uncached: float, sampled: float, others: float) -> float:
        """Return the seconds that such an answer is expected to take."""
        pace = self.decode + others * self.crowding
        return max(_SHORTEST, uncached * self.prefill + sampled * pace)

    def learn(self, uncached: int, sampled: int, others: float, seconds: float) -> None:
        """Learn from one answer."""
        expected = self.expected(uncached, sampled, others)
        error = log(max(_SHORTEST, seconds) / expected)
        self.answers += 1
        if self.answers <= _SCALED:
            self._scale(*[exp(error / self.answers)] * 3)
            return
        step = _STEP * max(-_LARGEST_ERROR, min(_LARGEST_ERROR, error)) / expected
        self._scale(
            exp(step * uncached * self.prefill),
            exp(step * sampled * self.decode),
            exp(step * sampled * others * self.crowding),
        )

    def _scale(self, prefill: float, decode: float, crowding: float) -> None:
        self.prefill *= prefill
        self.decode *= decode
        self.crowding *= crowding

"""What a router believes about one engine: what it holds, how fast it is, what it has to do.

Guarantees: memory is bounded by the engine's capacity; what the engine reports replaces what was believed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

from rollout_service.inference.contract import BackendLoad
from rollout_service.inference.routing.block_hashes import BLOCK_TOKENS
from rollout_service.inference.routing.prefixes import PrefixIndex
from rollout_service.inference.routing.rates import Rates

_DEFAULT_CAPACITY = 1_048_576
"""Tokens that an engine is taken to hold until it says or shows otherwise."""
_SMALLEST_CAPACITY, _LARGEST_CAPACITY = 4_096, 16_777_216
_SHRINK, _GROW, _FULL = 0.9, 1.02, 0.9
"""What a wrong expectation changes of a capacity that the engine does not state; the last is from when on it grows."""
_KNOWN_AFTER, _PATIENCE = 64, 0.01
"""Answers after which an engine may be found slower or faster than its pool, and what each of them weighs."""
_UNLIKE, _MOST_UNLIKE = 1.5, 8.0
"""From which factor on, since less is the noise of a moment; and up to which."""
_LOAD_SECONDS = 5.0
"""How long an engine's own report counts."""


@dataclass(slots=True)
class Engine:
    """One engine, as its answers and reports show it. Times are seconds on the router's clock."""

    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(_DEFAULT_CAPACITY // BLOCK_TOKENS))
    common_rates: Rates = field(default_factory=Rates)
    """The rates of all engines of the pool, which are mostly alike."""
    residents: dict[str, float] = field(default_factory=dict)
    """The rollouts that live here, and what each weighs: 1 on average."""
    weight: float = 0.0
    """The weight of all residents."""
    in_flight: int = 0
    """Requests of this pool."""
    last_chosen: int = 0
    """The number of the decision that chose it last."""
    _answers: int = 0
    _log_slowness: float = 0.0
    _clear_at: float = 0.0
    """When the prompts that were sent so far are expected to be read."""
    _most_in_flight: int = 0
    """Since the engine's last report, which is a moment old when it comes."""
    _foreign: int = 0
    """Requests that others have sent to it."""
    _reported_at: float = float("-inf")
    _states_capacity: bool = False

    @property
    def slowness(self) -> float:
        """Its time for an answer over that of its pool; 1 unless it is clearly unlike."""
        if self._answers < _KNOWN_AFTER or abs(self._log_slowness) < log(_UNLIKE):
            return 1.0
        return exp(self._log_slowness)

    @property
    def prefill_rate(self) -> float:
        """Seconds per prompt token that it does not hold."""
        return self.common_rates.prefill * self.slowness

    def learn(self, uncached: int, sampled: int, others: float, seconds: float) -> None:
        """Take in what an answer took."""
        ratio = seconds / self.common_rates.expected(uncached, sampled, others)
        error = log(max(1 / _MOST_UNLIKE, min(_MOST_UNLIKE, ratio)))
        self._answers += 1
        self._log_slowness += max(_PATIENCE, 1 / self._answers) * (error - self._log_slowness)
        self.common_rates.learn(uncached, sampled, others, seconds)

    def settle(self, rollout: str, weight: float) -> None:
        """A rollout has come to live here; the same again changes nothing."""
        if rollout not in self.residents:
            self.residents[rollout] = weight
            self.weight += weight

    def leave(self, rollout: str) -> None:
        """A rollout has ended or moved; one that does not live here changes nothing."""
        self.weight -= self.residents.pop(rollout, 0.0)
        if not self.residents:
            self.weight = 0.0

    def wait(self, now: float) -> float:
        """Seconds until the engine gets to a new prompt."""
        return max(0.0, self._clear_at - now)

    def busy(self, now: float) -> int:
        """Requests that it is working on, of this pool and of others."""
        return self.in_flight + (self._foreign if now - self._reported_at < _LOAD_SECONDS else 0)

    def begin(self, prefill: float, now: float) -> None:
        """A request was sent that needs `prefill` seconds."""
        self.in_flight += 1
        self._most_in_flight = max(self._most_in_flight, self.in_flight)
        self._clear_at = max(now, self._clear_at) + prefill

    def end(self, now: float) -> None:
        """A request has ended."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._clear_at = now

    def correct(self, chain: Sequence[int], held: int, cached: int, sent_at: float) -> None:
        """The engine had `cached` tokens of the prompt of `chain`, where `held` were expected at `sent_at`."""
        if cached + BLOCK_TOKENS <= held:
            self._lost(chain[cached // BLOCK_TOKENS], sent_at)
        elif cached >= held + BLOCK_TOKENS and len(self.prefixes) > _FULL * self.prefixes.capacity:
            self._resize(self.prefixes.capacity * BLOCK_TOKENS * _GROW)

    def observe(self, load: BackendLoad, now: float) -> None:
        """Take in the engine's own report."""
        self._reported_at = now
        self._foreign = max(0, load.running + load.waiting - self._most_in_flight)
        self._most_in_flight = self.in_flight
        if load.capacity_tokens:
            self._states_capacity = True
            self.prefixes.capacity = min(load.capacity_tokens, _LARGEST_CAPACITY) // BLOCK_TOKENS
        if load.waiting_tokens is not None:
            self._clear_at = max(self._clear_at, now + load.waiting_tokens * self.prefill_rate)

    def _lost(self, block: int, sent_at: float) -> None:
        # Prompts that were sent together share nothing yet: of them a miss says nothing.
        if self.prefixes.served_before(block, sent_at):
            # Less fits than was thought to be held; or all was flushed, and the capacity soon grows back.
            self._resize(len(self.prefixes) * BLOCK_TOKENS * _SHRINK)
            self.prefixes.drop(block)

    def _resize(self, blocks: float) -> None:
        if not self._states_capacity:
            self.prefixes.capacity = (
                max(_SMALLEST_CAPACITY, min(int(blocks), _LARGEST_CAPACITY)) // BLOCK_TOKENS
            )

"""The router's beliefs about one engine: the prefixes it holds, its speed, and the work ahead of it.

Guarantees: memory is bounded by the engine's capacity; the engine's own reports replace the beliefs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

from rollout_service.engines.contract import BackendLoad
from rollout_service.engines.routing.block_hashes import BLOCK_TOKENS
from rollout_service.engines.routing.cost_options import CostRouterOptions
from rollout_service.engines.routing.prefixes import PrefixIndex
from rollout_service.engines.routing.rates import Rates


@dataclass(slots=True)
class EngineModel:
    """One engine, as its answers and reports show it. Times are seconds on the router's clock."""

    options: CostRouterOptions = field(default_factory=CostRouterOptions)
    common_rates: Rates = field(default_factory=Rates)
    """The rates of all engines of the pool, which are mostly alike."""
    prefixes: PrefixIndex = field(init=False)
    """The blocks that it is believed to hold."""
    assigned_rollouts: dict[str, float] = field(default_factory=dict)
    """The rollouts whose turns go here, and the weight of each: 1 on average."""
    weight: float = 0.0
    """The weight of all assigned rollouts."""
    in_flight: int = 0
    """Requests of this pool."""
    last_chosen: int = 0
    """The number of the decision that chose it last."""
    _answers: int = 0
    _log_slowness: float = 0.0
    _clear_at: float = 0.0
    """When the prompts sent so far are expected to be read."""
    _most_in_flight: int = 0
    """The peak since the engine's last report, which is a moment old when it arrives."""
    _foreign: int = 0
    """Requests of other clients."""
    others_in_flight: float = 0.0
    """The same as an average over the last reports, for decisions whose effects last."""
    _reported_at: float = float("-inf")
    _states_capacity: bool = False

    def __post_init__(self) -> None:
        self.prefixes = PrefixIndex(self.options.default_capacity // BLOCK_TOKENS)

    @property
    def slowness(self) -> float:
        """Its time for an answer relative to its pool's; 1 unless it is clearly unlike."""
        options = self.options
        if self._answers < options.slowness_after or abs(self._log_slowness) < log(options.slowness_from):
            return 1.0
        return exp(self._log_slowness)

    @property
    def prefill_rate(self) -> float:
        """Seconds per prompt token that it does not hold."""
        return self.common_rates.prefill * self.slowness

    def learn(self, uncached: int, sampled: int, others: float, seconds: float) -> None:
        """Learn from the time that an answer took."""
        limit = self.options.slowness_limit
        ratio = seconds / self.common_rates.expected(uncached, sampled, others)
        error = log(max(1 / limit, min(limit, ratio)))
        self._answers += 1
        self._log_slowness += max(self.options.slowness_rate, 1 / self._answers) * (
            error - self._log_slowness
        )
        self.common_rates.learn(uncached, sampled, others, seconds)

    def assign(self, rollout: str, weight: float) -> None:
        """Assign a rollout to this engine; idempotent."""
        if rollout not in self.assigned_rollouts:
            self.assigned_rollouts[rollout] = weight
            self.weight += weight

    def unassign(self, rollout: str) -> None:
        """Remove a rollout that has ended or moved; does nothing for one that is not assigned."""
        self.weight -= self.assigned_rollouts.pop(rollout, 0.0)
        if not self.assigned_rollouts:
            self.weight = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until the engine gets to a new prompt."""
        return max(0.0, self._clear_at - now)

    def busy(self, now: float) -> int:
        """Return how many requests it is working on, of this pool and of other clients."""
        is_recent = now - self._reported_at < self.options.load_seconds
        return self.in_flight + (self._foreign if is_recent else 0)

    def begin(self, prefill: float, now: float) -> None:
        """Note that a request was sent, and that reading its prompt takes `prefill` seconds."""
        self.in_flight += 1
        self._most_in_flight = max(self._most_in_flight, self.in_flight)
        self._clear_at = max(now, self._clear_at) + prefill

    def end(self, now: float) -> None:
        """Note that a request has ended."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._clear_at = now

    def correct(self, chain: Sequence[int], held: int, cached: int, sent_at: float) -> None:
        """Learn that `cached` tokens of the prompt of `chain` were held where `held` were expected at `sent_at`."""
        if cached + BLOCK_TOKENS <= held:
            self._drop_lost(chain[cached // BLOCK_TOKENS], sent_at)
        elif cached >= held + BLOCK_TOKENS and self._is_full:
            self._resize(self.prefixes.capacity * BLOCK_TOKENS * self.options.capacity_growth)

    def observe(self, load: BackendLoad, now: float) -> None:
        """Learn from the engine's own report."""
        self._reported_at = now
        self._foreign = max(0, load.running + load.waiting - self._most_in_flight)
        self._average_others()
        self._most_in_flight = self.in_flight
        if load.capacity_tokens:
            self._states_capacity = True
            capacity = min(load.capacity_tokens, self.options.largest_capacity)
            self.prefixes.capacity = capacity // BLOCK_TOKENS
        if load.waiting_tokens is not None:
            self._clear_at = max(self._clear_at, now + load.waiting_tokens * self.prefill_rate)

    def _average_others(self) -> None:
        self.others_in_flight += self.options.others_rate * (self._foreign - self.others_in_flight)
        if self.others_in_flight < self.options.others_from:
            self.others_in_flight = 0.0

    @property
    def _is_full(self) -> bool:
        return len(self.prefixes) > self.options.capacity_full * self.prefixes.capacity

    def _drop_lost(self, block: int, sent_at: float) -> None:
        # Prompts that were sent together share nothing yet, so a miss says nothing about them.
        if self.prefixes.served_before(block, sent_at):
            # Less fits than was believed; or the cache was flushed, and the capacity soon grows back.
            self._resize(len(self.prefixes) * BLOCK_TOKENS * self.options.capacity_shrink)
            self.prefixes.drop(block)

    def _resize(self, tokens: float) -> None:
        if not self._states_capacity:
            smallest, largest = self.options.smallest_capacity, self.options.largest_capacity
            self.prefixes.capacity = max(smallest, min(int(tokens), largest)) // BLOCK_TOKENS

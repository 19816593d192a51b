"""The router's beliefs about one engine: the prefixes it holds, its speed, and the work ahead of it.

Memory is bounded by the engine's capacity; the engine's own reports replace the beliefs.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf, log

from rollout_service.engines.contract import BackendLoad

BLOCK_TOKENS = 64
_MAX_CONVERSATIONS = 65_536
_LOAD_SECONDS = 5.0
"""How long a report of other clients' requests counts; it is polled every second. There are no such clients in the
simulation; `test_work_that_others_sent_to_an_engine_counts` covers them."""
_OTHERS_RATE = 0.3
"""A report's weight in the average of other clients' requests: about the last three seconds count."""
_OTHERS_FROM = 0.1
"""An average below this counts as nothing, so that a single node's decisions stay as they are. A report of one
request is above it."""
_DEFAULT_CAPACITY = 1_048_576
"""Tokens assumed until an engine reports or shows otherwise. SGLang reports it; where an engine does not, half of
its true capacity as the first guess costs 0.2 % of the cached tokens."""
_SMALLEST_CAPACITY = 4_096
"""Tokens; a bound that no measurement reaches."""
_LARGEST_CAPACITY = 16_777_216
"""Tokens; bounds the router's memory."""
_CAPACITY_SHRINK = 0.9
"""When a block is missing that the engine had, its capacity is estimated as this part of its supposed contents
(`test_a_capacity_that_is_not_stated_is_learned`)."""
_CAPACITY_GROWTH = 1.02
"""The estimate grows by this factor when an engine held more than was expected (same test)."""
_CAPACITY_FULL = 0.9
"""It grows only while more than this part of it is believed to be in use: with room left, capacity was not the
reason."""
_SLOWNESS_AFTER = 32
"""Answers after which an engine may be found slower or faster than its pool. At 64, turns with one engine in four
that is four times as slow have a 9 % longer p99."""
_SLOWNESS_RATE = 0.01
"""The weight of one answer in that average, so that one delayed by a compilation changes little. At 0.1 the
slow engine is given 0.36."""
_SLOWNESS_FROM = 1.5
"""The factor from which an engine counts as unlike; less is noise of the moment. At 1 nothing in the simulation
changes by more than 0.002, since its engines have no such noise."""
_SLOWNESS_LIMIT = 8.0
"""The factor up to which one answer counts, either way. At 2 the slow engine is given 0.41."""


def extend_chain(chain: Sequence[int], ids: Sequence[int], *, begin: int = 0) -> list[int]:
    """Return the hashes of all whole blocks of a prompt; `chain` has the first ones, and `ids` all from `begin` on.

    Two prompts share a block if they agree on it and on all before it. Python's own hash of integers is the same in
    every process; two blocks that collide cost only a wrong estimate.
    """
    hashes = list(chain)
    above = hashes[-1] if hashes else 0
    for start in range(len(hashes) * BLOCK_TOKENS - begin, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        above = hash((above, tuple(ids[start : start + BLOCK_TOKENS])))
        hashes.append(above)
    return hashes


class Chains:
    """Chains of conversations by name, of which only the new part is hashed; one that was unused for long is forgotten,
    and hashed from the start.
    """

    def __init__(self, *, most: int = _MAX_CONVERSATIONS) -> None:
        self._most = most
        self._chains: OrderedDict[str, list[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chains)

    def of(self, ids: Sequence[int], name: str | None) -> list[int]:
        """Return a prompt's chain, which usually extends the last one of the conversation `name`."""
        known = self._chains.get(name, []) if name is not None else []
        chain = extend_chain(known if _begins_with(ids, known) else (), ids)
        self.keep(chain, name)
        return chain

    def keep(self, chain: list[int], name: str | None) -> None:
        if name is None:
            return
        self._chains[name] = chain
        self._chains.move_to_end(name)
        if len(self._chains) > self._most:
            self._chains.popitem(last=False)

    def drop(self, name: str) -> None:
        self._chains.pop(name, None)


def _begins_with(ids: Sequence[int], chain: Sequence[int]) -> bool:
    """Return whether the last block of `chain` is in its place; an edit before it nearly always moves it."""
    end = len(chain) * BLOCK_TOKENS
    if not chain or end > len(ids):
        return False
    above = chain[-2] if len(chain) > 1 else 0
    return hash((above, tuple(ids[end - BLOCK_TOKENS : end]))) == chain[-1]


@dataclass(slots=True)
class _Block:
    above: int | None
    """The hash of the block before it."""
    served_at: float = inf
    """When an answer first showed that it is held; infinite while its prompt is only on its way."""
    below: set[int] | None = None
    """The hashes of the blocks that follow it; most blocks at the end of a prompt never have any."""


class PrefixIndex:
    """The blocks that an engine is expected to hold in its prefix cache; `capacity` counts blocks.

    A tree mirrors the engine's own. Eviction is LRU, and never removes a block before those that follow it. So the held
    blocks of a chain are its first ones, and memory is bounded by the capacity. A block was used whenever one that
    follows it was, so only the order of the ends of chains is kept: the cost of a turn grows with its new blocks, not
    with its prompt. Two blocks may have one hash, which costs a wrong estimate: nothing relies on a block being where
    its chain says.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: dict[int, _Block] = {}
        self._ends: OrderedDict[int, None] = OrderedDict()
        """Least recently used first: every block that none follows, and some others."""

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, blocks: int) -> None:
        self._capacity = max(1, blocks)
        self._evict()

    def match(self, chain: Sequence[int]) -> int:
        """Return how many blocks of `chain` are held, looking at log2(len(chain)) of them."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self._blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def hold(self, chain: Sequence[int], *, served_at: float = inf) -> None:
        """Note that the engine holds these, or showed so at `served_at`; of too many, keep the first."""
        if not chain:
            return
        if len(chain) > self._capacity:
            chain = chain[: self._capacity]
        if (held := self.match(chain)) < len(chain):
            self._add(chain, held)
        self._ends[chain[-1]] = None
        self._ends.move_to_end(chain[-1])
        self._serve(chain, served_at)
        self._evict()

    def _add(self, chain: Sequence[int], begin: int) -> None:
        """Add the blocks from `begin` on; those before are held."""
        above = chain[begin - 1] if begin else None
        if above is not None:
            self._ends.pop(above, None)
        for position in range(begin, len(chain)):
            block = chain[position]
            if above is not None:
                parent = self._blocks[above]
                parent.below = parent.below or set()
                parent.below.add(block)
            self._blocks[block] = _Block(above)
            above = block

    def _serve(self, chain: Sequence[int], served_at: float) -> None:
        """Note when blocks were served: none later than one that follows it."""
        for position in range(len(chain) - 1, -1, -1):
            block = self._blocks.get(chain[position])
            if block is None or block.served_at <= served_at:
                return
            block.served_at = served_at

    def served_before(self, block: int, moment: float) -> bool:
        return block in self._blocks and self._blocks[block].served_at <= moment

    def drop(self, block: int) -> None:
        """Drop a block that the engine has lost, with all its descendants."""
        if block not in self._blocks:
            return
        if (above := self._part(block)) is not None:
            self._ends.setdefault(above)  # the engine has just shown that it holds this one
        doomed = [block]
        while doomed:
            one = doomed.pop()
            self._ends.pop(one, None)
            if (lost := self._blocks.pop(one, None)) is not None and lost.below:
                doomed.extend(lost.below)

    def clear(self) -> None:
        self._blocks.clear()
        self._ends.clear()

    def _evict(self) -> None:
        while len(self._blocks) > self._capacity:
            if not self._ends:  # a chain has the same hash twice
                self.clear()
                return
            block, _ = self._ends.popitem(last=False)
            known = self._blocks.get(block)
            if known is None or known.below:
                continue
            if (above := self._part(block)) is not None and above not in self._ends:
                self._ends[above] = None  # it was used when the evicted one was
                self._ends.move_to_end(above, last=False)
            del self._blocks[block]

    def _part(self, block: int) -> int | None:
        """Unlink a block; return the one before it if nothing else follows it."""
        above = self._blocks[block].above
        parent = self._blocks.get(above) if above is not None else None
        if parent is None:
            return None
        if parent.below:
            parent.below.discard(block)
        return None if parent.below else above


_SCALED = 8
"""First answers, which scale all rates alike."""
_STEP = 0.05
"""The part of an error that a later answer corrects."""
_LARGEST_ERROR = 1.0
"""As a logarithm: a factor of e."""
_BIAS_RATE = 0.05
"""An answer's weight in the recent mean error."""
_SHORTEST = 1e-6
"""The shortest time that counts, in seconds."""


@dataclass(slots=True)
class Rates:
    """The seconds per token of one engine, learned from its answers; the initial values are a guess.

    The time of an answer is taken as `uncached prompt tokens * prefill + sampled tokens * (decode + others *
    crowding)`, where the others are the requests that ran at the same time: without them a busy engine would be taken
    for a slow one.

    The first answers scale all rates alike, by the mean of the logarithms of their errors. From then on an error
    changes each rate in proportion to its part in the expected time (an exponentiated gradient): rates stay positive,
    no unit has to be chosen, and answers that are nearly all sampling hardly change the prefill rate. An error counts
    up to a bound, so one answer that waited for a compilation changes little.
    """

    prefill: float = 1e-4
    """Per prompt token that is not cached."""
    decode: float = 1e-2
    """Per sampled token of a request that runs alone."""
    crowding: float = 3e-4
    """Added to a sampled token by each other request."""
    answers: int = 0
    bias: float = 0.0
    """The recent mean logarithm of the answers' times over the expected ones: all engines are slower by it."""

    def expected(self, uncached: float, sampled: float, others: float) -> float:
        pace = self.decode + others * self.crowding
        return max(_SHORTEST, uncached * self.prefill + sampled * pace)

    def learn(self, uncached: float, sampled: int, others: float, seconds: float) -> None:
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


@dataclass(slots=True)
class EngineModel:
    """One engine, as its answers and reports show it. Times are seconds on the router's clock."""

    common_rates: Rates = field(default_factory=Rates)
    """The rates of all engines of the pool, which are mostly alike."""
    prefixes: PrefixIndex = field(init=False)
    assigned: dict[str, float] = field(default_factory=dict)
    """The weights, in tokens, of the rollouts whose turns go here."""
    weight: float = 0.0
    """The weight of all assigned rollouts."""
    expected: float = 0.0
    """The weight of further samples of their groups."""
    in_flight: int = 0
    """Requests of this pool."""
    last_chosen: int = 0
    """The number of a decision."""
    _answers: int = 0
    _log_slowness: float = 0.0
    sent_tokens: int = 0
    """Sent to it to read so far."""
    _unread: float = 0.0
    """Tokens sent but not read at `_unread_at`."""
    _unread_at: float = 0.0
    _reported_unread: float = 0.0
    """The same by its last report, which knows the prompts of other clients."""
    _most_in_flight: int = 0
    """The peak since the engine's last report, which is a moment old when it arrives."""
    _foreign: int = 0
    """Requests of other clients."""
    others_in_flight: float = 0.0
    """The same as an average over the last reports, for decisions whose effects last."""
    _reported_at: float = float("-inf")
    _states_capacity: bool = False

    def __post_init__(self) -> None:
        self.prefixes = PrefixIndex(_DEFAULT_CAPACITY // BLOCK_TOKENS)

    @property
    def slowness(self) -> float:
        """Its time for an answer relative to its pool's; 1 unless it is clearly unlike."""
        if self._answers < _SLOWNESS_AFTER or abs(self._log_slowness) < log(_SLOWNESS_FROM):
            return 1.0
        return exp(self._log_slowness)

    @property
    def prefill_rate(self) -> float:
        """Seconds per prompt token that it does not hold."""
        return self.common_rates.prefill * self.slowness

    def learn(self, uncached: float, sampled: int, others: float, seconds: float, *, ahead: float = 0.0) -> None:
        """Learn from the time of an answer; `ahead` tokens at most were read before its own."""
        rates, limit = self.common_rates, _SLOWNESS_LIMIT
        rest = seconds - rates.expected(uncached, sampled, others)
        uncached += max(0.0, min(ahead, rest / rates.prefill))
        error = log(max(1 / limit, min(limit, seconds / rates.expected(uncached, sampled, others))))
        self._answers += 1
        weight = max(_SLOWNESS_RATE, 1 / self._answers)
        self._log_slowness += weight * (error - rates.bias - self._log_slowness)
        rates.bias += _BIAS_RATE * (error - rates.bias)
        rates.learn(uncached, sampled, others, seconds)

    def assign(self, rollout: str, weight: float) -> None:
        """Assign a rollout; idempotent."""
        if rollout not in self.assigned:
            self.assigned[rollout] = weight
            self.weight += weight

    def unassign(self, rollout: str) -> None:
        """Remove a rollout that has ended or moved; does nothing for one that is not assigned."""
        self.weight -= self.assigned.pop(rollout, 0.0)
        if not self.assigned:
            self.weight = 0.0

    def wait(self, now: float) -> float:
        if not (self._unread or self._reported_unread) or not self.common_rates.answers:
            return 0.0  # nothing is known of its pace before the first answer
        rate = self.prefill_rate
        sent = self._unread * rate - (now - self._unread_at)
        return max(0.0, sent, self._reported_unread * rate - (now - self._reported_at))

    def busy(self, now: float) -> int:
        """Count requests of this pool and of other clients."""
        is_recent = now - self._reported_at < _LOAD_SECONDS
        return self.in_flight + (self._foreign if is_recent else 0)

    def begin(self, tokens: int, now: float) -> None:
        """Note a request of which `tokens` have to be read."""
        self.sent_tokens += tokens
        self.in_flight += 1
        self._most_in_flight = max(self._most_in_flight, self.in_flight)
        self._unread = tokens + (self._left(now) if self._unread else 0.0)
        self._unread_at = now

    def end(self, now: float, read: int | None) -> None:
        """Note that a request has ended; an answer shows that the tokens sent up to it, `read`, were read."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._unread = 0.0
        elif read is not None:
            self._unread, self._unread_at = min(self._left(now), self.sent_tokens - read), now

    def _left(self, now: float) -> float:
        return max(0.0, self._unread - (now - self._unread_at) / self.prefill_rate)

    def correct(self, chain: Sequence[int], held: int, cached: int, sent_at: float) -> None:
        """Learn that `cached` tokens of the prompt of `chain` were held where `held` were expected at `sent_at`."""
        if cached + BLOCK_TOKENS <= held:
            self._drop_lost(chain[cached // BLOCK_TOKENS], sent_at)
        elif cached >= held + BLOCK_TOKENS and self._is_full:
            self._resize(self.prefixes.capacity * BLOCK_TOKENS * _CAPACITY_GROWTH)

    def observe(self, load: BackendLoad, now: float) -> None:
        self._reported_at = now
        self._foreign = max(0, load.running + load.waiting - self._most_in_flight)
        self._average_others()
        self._most_in_flight = self.in_flight
        if load.capacity_tokens:
            self._states_capacity = True
            capacity = min(load.capacity_tokens, _LARGEST_CAPACITY)
            self.prefixes.capacity = capacity // BLOCK_TOKENS
        if load.waiting_tokens is not None:
            self._reported_unread = load.waiting_tokens

    def _average_others(self) -> None:
        self.others_in_flight += _OTHERS_RATE * (self._foreign - self.others_in_flight)
        if self.others_in_flight < _OTHERS_FROM:
            self.others_in_flight = 0.0

    @property
    def _is_full(self) -> bool:
        return len(self.prefixes) > _CAPACITY_FULL * self.prefixes.capacity

    def _drop_lost(self, block: int, sent_at: float) -> None:
        # Prompts that were sent together share nothing yet, so a miss says nothing about them.
        if self.prefixes.served_before(block, sent_at):
            # Less fits than was believed; or the cache was flushed, and the capacity soon grows back.
            self._resize(len(self.prefixes) * BLOCK_TOKENS * _CAPACITY_SHRINK)
            self.prefixes.drop(block)

    def _resize(self, tokens: float) -> None:
        if not self._states_capacity:
            smallest, largest = _SMALLEST_CAPACITY, _LARGEST_CAPACITY
            self.prefixes.capacity = max(smallest, min(int(tokens), largest)) // BLOCK_TOKENS

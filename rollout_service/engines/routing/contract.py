"""The protocol between a pool and its router.

Every `choose` is followed by exactly one `ended` with its decision, however the request ended. Once the request has
been sent there is a `settle`, for work that the choice need not wait for.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from api_schemas.inference import PoolOutcome
from rollout_service.engines.contract import BackendLoad, GenerateRequest, Generation


@dataclass(frozen=True, slots=True)
class Candidate:
    backend_id: str
    in_flight: int
    """Requests of this pool."""
    share: float = 1.0
    """The part of its fair share that it may take, above 0 and up to 1; below 1 shortly after it joined."""
    is_local: bool = False


class Reason(StrEnum):
    ONLY = "only"
    """There was no other."""
    HOME = "home"
    """The rollout's earlier turns were there."""
    PREFIX = "prefix"
    """The rollout is new, and the backend holds more of the prompt than others do, from another rollout."""
    LOAD = "load"
    """The rollout is new and no backend holds more than the others; this one has the least to do."""
    MOVED = "moved"
    """The rollout's own backend was a candidate, and another was expected to answer sooner."""
    HOMELESS = "homeless"
    """The rollout's own backend is out of service, or has just failed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The expected cost of a request on one backend; all but the tokens are in seconds."""

    backend_id: str
    held_tokens: int
    wait: float
    """Time until it gets to this request."""
    prefill: float
    """Cost of the tokens that it does not hold."""
    move: float
    """The gain that another engine than the rollout's own must offer; 0 on its own."""
    contention: float
    """Time that the rollouts assigned to it are expected to take, now and in later turns."""

    @property
    def total(self) -> float:
        return self.wait + self.prefill + self.move + self.contention


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    backend_id: str
    reason: Reason
    affinity: str | None = None
    prompt_tokens: int
    held_tokens: int = 0
    """Prompt tokens that it was expected to hold."""
    costs: tuple[Cost, ...] = ()
    """The cost of every candidate; empty from a router without costs."""


class RequestEnd(StrEnum):
    ANSWERED = "answered"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Observer(Protocol):
    """Must not block. Every method does nothing by default."""

    def decided(self, pool: str, decision: Decision) -> None: ...

    def served(self, pool: str, decision: Decision, cached_tokens: int) -> None: ...

    def ended(self, pool: str, backend_id: str, seconds: float, end: RequestEnd) -> None: ...

    def answered(self, pool: str, seconds: float) -> None:
        """Note that a request was answered; `seconds` include all waits and repetitions."""

    def loaded(self, outcome: PoolOutcome, seconds: float) -> None: ...


class Router(Protocol):
    def choose(self, candidates: Sequence[Candidate], request: GenerateRequest, affinity: str | None) -> Decision:
        """Choose one of `candidates`, which are never empty; `affinity` names the rollout of the request."""

    def settle(self) -> None: ...

    def ended(self, decision: Decision, request: GenerateRequest, answer: Generation | None) -> None:
        """Note that the request has ended; `answer` is None after an error or a cancellation."""

    def observe(self, backend_id: str, load: BackendLoad) -> None: ...

    def release(self, affinity: str) -> None: ...

    def forget(self, backend_id: str) -> None:
        """Note that a backend has left, or lost its KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRouterOptions:
    """How the cost router weighs and learns, each with the measurement that justifies it.

    `benchmarks/routing.py` justifies them as a set: 0.99 of the possible cached tokens at an imbalance of at most 1.03.
    The effect of each alone was measured in the simulated time of
    `tests/unit/inference/routing/test_routing_simulation.py`, as means over 2 and 4 engines and three seeds. With the
    defaults, 0.993 of the possible tokens are cached, the imbalance is 1.020, and 0.03 % of the turns move. If one
    engine in four takes four times as long as the others, it gets 0.35 of the tokens that each of them gets.
    """

    # ---- choosing

    equal_ratio: float = 0.02
    """Costs that differ by at most this ratio are equal: then the rollout's own engine wins, else one on this node,
    else the one that was chosen longest ago. At 0 the imbalance is 1.037."""
    equal_seconds: float = 1e-4
    """The same in seconds, for the costs near zero of idle engines. The simulation shows no effect;
    `test_an_engine_on_this_node_is_preferred_at_equal_cost` covers such costs."""
    move_turns: float = 0.25
    """The part of a turn that a move has to save, since expectations err by as much and KV in two places wastes room.
    At 0 thirty times as many turns move (0.9 %), and the imbalance is 1.029."""
    free_rollouts: int = 12
    """Rollouts that an engine may have whatever the others have, so that a small group can share its prompt. At 8 one
    group in 200 is split by the simulation; `test_a_group_stays_together` covers it."""
    fair_groups: float = 1.5
    """Groups that an engine may have beyond its fair share before a sample leaves its group, because the next groups go
    to the others first. At 0.5, 0.992 of the tokens are cached in the traffic of the real engines."""
    load_seconds: float = 5.0
    """How long a report of other clients' requests counts; it is polled every second. There are no such clients in the
    simulation; `test_work_that_others_sent_to_an_engine_counts` covers them."""
    others_rate: float = 0.3
    """A report's weight in the average of other clients' requests: about the last three seconds count."""
    others_from: float = 0.1
    """An average below this counts as nothing, so that a single node's decisions stay as they are. A report of one
    request is above it."""

    # ---- the capacity of an engine's cache

    default_capacity: int = 1_048_576
    """Tokens assumed until an engine reports or shows otherwise. SGLang reports it; where an engine does not, half of
    its true capacity as the first guess costs 0.2 % of the cached tokens."""
    smallest_capacity: int = 4_096
    """Tokens; a bound that no measurement reaches."""
    largest_capacity: int = 16_777_216
    """Tokens; bounds the router's memory."""
    capacity_shrink: float = 0.9
    """When a block is missing that the engine had, its capacity is estimated as this part of its supposed contents
    (`test_a_capacity_that_is_not_stated_is_learned`)."""
    capacity_growth: float = 1.02
    """The estimate grows by this factor when an engine held more than was expected (same test)."""
    capacity_full: float = 0.9
    """It grows only while more than this part of it is believed to be in use: with room left, capacity was not the
    reason."""

    # ---- engines that are unlike their pool

    slowness_after: int = 32
    """Answers after which an engine may be found slower or faster than its pool. At 64, turns with one engine in four
    that is four times as slow have a 9 % longer p99."""
    slowness_rate: float = 0.01
    """The weight of one answer in that average, so that one delayed by a compilation changes little. At 0.1 the
    slow engine is given 0.36."""
    slowness_from: float = 1.5
    """The factor from which an engine counts as unlike; less is noise of the moment. At 1 nothing in the simulation
    changes by more than 0.002, since its engines have no such noise."""
    slowness_limit: float = 8.0
    """The factor up to which one answer counts, either way. At 2 the slow engine is given 0.41."""


class LeastLoaded:
    """Keeps a rollout on its backend; places a new one on the backend with the least load for its share.

    For engines that share no prefixes, and as a baseline. A backend's load is its requests in flight or the rollouts
    assigned to it, whichever is more, because a rollout that waits for a tool will return.
    """

    def __init__(self) -> None:
        self._sticky_backends: dict[str, str] = {}
        self._assigned: Counter[str] = Counter()
        self._last_chosen: dict[str, int] = {}
        self._choices = 0

    def choose(self, candidates: Sequence[Candidate], request: GenerateRequest, affinity: str | None) -> Decision:
        sticky = self._sticky_backends.get(affinity) if affinity is not None else None
        chosen = next((each for each in candidates if each.backend_id == sticky), None)
        reason = Reason.HOME
        if chosen is None:
            reason = Reason.LOAD if sticky is None else Reason.HOMELESS
            chosen = min(candidates, key=self._cost)
            if affinity is not None:
                self._assign(affinity, chosen.backend_id)
        self._choices += 1
        self._last_chosen[chosen.backend_id] = self._choices
        return Decision(
            backend_id=chosen.backend_id,
            reason=reason,
            affinity=affinity,
            prompt_tokens=len(request.input_ids),
        )

    def settle(self) -> None:
        pass

    def ended(self, decision: Decision, request: GenerateRequest, answer: Generation | None) -> None:
        del decision, request, answer

    def observe(self, backend_id: str, load: BackendLoad) -> None:
        del backend_id, load

    def release(self, affinity: str) -> None:
        sticky = self._sticky_backends.pop(affinity, None)
        if sticky is not None:
            self._assigned[sticky] -= 1

    def forget(self, backend_id: str) -> None:
        self._sticky_backends = {
            affinity: sticky for affinity, sticky in self._sticky_backends.items() if sticky != backend_id
        }
        self._assigned.pop(backend_id, None)
        self._last_chosen.pop(backend_id, None)

    def _cost(self, candidate: Candidate) -> tuple[float, bool, int]:
        load = max(candidate.in_flight, self._assigned[candidate.backend_id])
        last_chosen = self._last_chosen.get(candidate.backend_id, 0)
        return (load + 1) / candidate.share, not candidate.is_local, last_chosen

    def _assign(self, affinity: str, backend_id: str) -> None:
        self.release(affinity)
        self._sticky_backends[affinity] = backend_id
        self._assigned[backend_id] += 1

"""The protocol between a pool and its router.

Every `choose` is followed by exactly one `ended` with its decision, however the request ended. Once the request has
been sent there is a `settle`, for work that the choice need not wait for.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from api_schemas.inference import PoolOutcome
from rollout_service.engines.contract import BackendLoad, GenerateRequest, Generation


class Candidate(NamedTuple):
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


class Cost(NamedTuple):
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

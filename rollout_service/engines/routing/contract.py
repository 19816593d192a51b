"""The protocol between a pool and its router.

Every `choose` is followed by exactly one `ended` with its decision, however the request ended. Once the request has
been sent there is a `settle`, for work that the choice need not wait for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from api_schemas.inference import PoolOutcome
from rollout_service.engines.contract import BackendLoad, GenerateRequest, Generation


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend in service, as a router sees it."""

    backend_id: str
    in_flight: int
    """Requests of this pool that it is working on."""
    share: float = 1.0
    """The part of its fair share that it may take, above 0 and up to 1: below 1 shortly after it joined."""
    is_local: bool = False
    """Whether it runs on this node."""


class Reason(StrEnum):
    """Why a backend was chosen."""

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
    """Prompt tokens that it is expected to hold."""
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
        """The sum, by which candidates are compared."""
        return self.wait + self.prefill + self.move + self.contention


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """A choice and everything that it was based on."""

    backend_id: str
    reason: Reason
    affinity: str | None = None
    prompt_tokens: int
    held_tokens: int = 0
    """Prompt tokens that the chosen backend was expected to hold."""
    costs: tuple[Cost, ...] = ()
    """The cost of every candidate; empty from a router without costs."""


class RequestEnd(StrEnum):
    """How a request to a backend ended."""

    ANSWERED = "answered"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Observer(Protocol):
    """Notified of what a pool does; must not block. Every method does nothing by default."""

    def decided(self, pool: str, decision: Decision) -> None:
        """Note that a backend was chosen."""

    def served(self, pool: str, decision: Decision, cached_tokens: int) -> None:
        """Note that the backend answered, and had held `cached_tokens` of the prompt."""

    def ended(self, pool: str, backend_id: str, seconds: float, end: RequestEnd) -> None:
        """Note that a request to a backend ended, after this time."""

    def answered(self, pool: str, seconds: float) -> None:
        """Note that the pool answered a request, after this time, with all waits and repetitions."""

    def loaded(self, outcome: PoolOutcome, seconds: float) -> None:
        """Note that new weights were sent to the backends, and how that went."""


class Router(Protocol):
    """Chooses a backend for each request."""

    def choose(
        self, candidates: Sequence[Candidate], request: GenerateRequest, affinity: str | None
    ) -> Decision:
        """Choose one of `candidates`, which are never empty; `affinity` names the rollout of the request."""

    def settle(self) -> None:
        """Do what `choose` left for later, if anything."""

    def ended(self, decision: Decision, request: GenerateRequest, answer: Generation | None) -> None:
        """Note that the request has ended; `answer` is None after an error or a cancellation."""

    def observe(self, backend_id: str, load: BackendLoad) -> None:
        """Note an engine's report about itself."""

    def release(self, affinity: str) -> None:
        """Forget a rollout that has ended."""

    def forget(self, backend_id: str) -> None:
        """Forget a backend that has left, or lost its KV."""

"""What a pool and its router say to each other.

Every `choose` is followed by exactly one `ended` with the decision it gave, however the request ended. Once the request
has been sent there is a `settle`, for what a router has to do and its choice need not wait for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rollout_service.inference.contract import BackendLoad, GenerateRequest, Generation


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend in service, as a router sees it."""

    backend_id: str
    in_flight: int
    """Requests of this pool that it is working on."""
    share: float = 1.0
    """How much of its fair share it may take, above 0 and up to 1: below 1 shortly after it came in."""
    is_local: bool = False
    """Whether it runs on this node."""


class Reason(StrEnum):
    """Why a backend was chosen."""

    ONLY = "only"
    """There was no other."""
    HOME = "home"
    """The rollout's earlier turns were there."""
    PREFIX = "prefix"
    """A rollout without a home: it holds more of the prompt than the others do, of another rollout."""
    LOAD = "load"
    """A rollout without a home, and none holds more than the others: the one with the least to do."""
    MOVED = "moved"
    """The rollout's home was a candidate, and another was expected to answer sooner."""
    HOMELESS = "homeless"
    """The rollout's home is out of service, or has just failed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a request is expected to cost on one backend, in seconds but for the first."""

    backend_id: str
    held_tokens: int
    """Prompt tokens that it is expected to hold."""
    wait: float
    """Until it gets to this request."""
    prefill: float
    """The cost of the tokens that it does not hold."""
    move: float
    """By which another engine than the home has to be better, so that rollouts do not wander: 0 for the home."""
    crowd: float
    """What the rollouts that live there are expected to take, now and in the turns to come."""

    @property
    def total(self) -> float:
        """What is compared."""
        return self.wait + self.prefill + self.move + self.crowd


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """A choice, and all that it was made from."""

    backend_id: str
    reason: Reason
    affinity: str | None = None
    prompt_tokens: int
    held_tokens: int = 0
    """Prompt tokens that the chosen backend was expected to hold."""
    costs: tuple[Cost, ...] = ()
    """The cost of every candidate; empty from a router without costs."""


class Observer(Protocol):
    """Told of every decision and its outcome; must not wait."""

    def decided(self, pool: str, decision: Decision) -> None:
        """A backend was chosen."""

    def served(self, pool: str, decision: Decision, cached_tokens: int) -> None:
        """The backend answered, and had held `cached_tokens` of the prompt."""


class Router(Protocol):
    """Chooses a backend for each request."""

    def choose(
        self, candidates: Sequence[Candidate], request: GenerateRequest, affinity: str | None
    ) -> Decision:
        """One of `candidates`, which are never empty; `affinity` names the rollout that the request
        belongs to.
        """

    def settle(self) -> None:
        """Do what `choose` left for later; where there is nothing, nothing."""

    def ended(self, decision: Decision, request: GenerateRequest, answer: Generation | None) -> None:
        """The request that was decided on has ended, with None by an error or a cancellation."""

    def observe(self, backend_id: str, load: BackendLoad) -> None:
        """What the engine says about itself."""

    def release(self, affinity: str) -> None:
        """The rollout has ended."""

    def forget(self, backend_id: str) -> None:
        """The backend has left, or lost its KV."""

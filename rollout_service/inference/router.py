"""Which backend serves a request: the one decision of a pool, behind a small protocol.

`LeastLoaded` keeps a rollout on the backend that holds its KV, spreads rollouts by how many each backend
has, and lets a backend that has just come in take its share gradually.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout_service.inference.contract import GenerateRequest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend in service, as a router sees it."""

    backend_id: str
    in_flight: int
    """Requests of this pool that it is working on."""
    share: float
    """How much of its fair share it may take, above 0 and up to 1: below 1 shortly after it came in."""


class Router(Protocol):
    """Chooses a backend for each request."""

    def choose(
        self, candidates: Sequence[Candidate], request: GenerateRequest, affinity: str | None
    ) -> Candidate:
        """One of `candidates`, which are never empty; `affinity` names the rollout that the request
        belongs to.
        """

    def release(self, affinity: str) -> None:
        """The rollout has ended."""

    def forget(self, backend_id: str) -> None:
        """The backend has left, or lost its KV."""


class LeastLoaded:
    """Sticky by affinity; otherwise the backend with the least load for its share.

    A backend's load is the larger of its requests in flight and the rollouts that live on it, because a
    rollout that waits for a tool will be back.
    """

    def __init__(self) -> None:
        self._homes: dict[str, str] = {}
        self._residents: Counter[str] = Counter()
        self._last_chosen: dict[str, int] = {}
        self._choices = 0

    def choose(
        self, candidates: Sequence[Candidate], request: GenerateRequest, affinity: str | None
    ) -> Candidate:
        del request
        home = self._homes.get(affinity) if affinity is not None else None
        chosen = next((each for each in candidates if each.backend_id == home), None)
        if chosen is None:
            chosen = min(candidates, key=self._cost)
            if affinity is not None:
                self._move(affinity, chosen.backend_id)
        self._choices += 1
        self._last_chosen[chosen.backend_id] = self._choices
        return chosen

    def release(self, affinity: str) -> None:
        home = self._homes.pop(affinity, None)
        if home is not None:
            self._residents[home] -= 1

    def forget(self, backend_id: str) -> None:
        self._homes = {affinity: home for affinity, home in self._homes.items() if home != backend_id}
        self._residents.pop(backend_id, None)
        self._last_chosen.pop(backend_id, None)

    def _cost(self, candidate: Candidate) -> tuple[float, int]:
        load = max(candidate.in_flight, self._residents[candidate.backend_id])
        return (load + 1) / candidate.share, self._last_chosen.get(candidate.backend_id, 0)

    def _move(self, affinity: str, backend_id: str) -> None:
        self.release(affinity)
        self._homes[affinity] = backend_id
        self._residents[backend_id] += 1

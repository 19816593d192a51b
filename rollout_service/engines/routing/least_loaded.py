"""A router that only counts: for engines that share no prefixes, and as a baseline to compare with."""

from collections import Counter
from collections.abc import Sequence

from rollout_service.engines.contract import BackendLoad, GenerateRequest, Generation
from rollout_service.engines.routing.contract import Candidate, Decision, Reason


class LeastLoaded:
    """Keeps a rollout on its backend; places a new one on the backend with the least load for its share.

    A backend's load is its requests in flight or the rollouts assigned to it, whichever is more, because a rollout
    that waits for a tool will return.
    """

    def __init__(self) -> None:
        self._sticky_backends: dict[str, str] = {}
        self._assigned: Counter[str] = Counter()
        self._last_chosen: dict[str, int] = {}
        self._choices = 0

    def choose(
        self, candidates: Sequence[Candidate], request: GenerateRequest, affinity: str | None
    ) -> Decision:
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

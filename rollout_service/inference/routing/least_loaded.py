"""A router that only counts: for pools whose engines share no prefixes, and to compare with."""

from collections import Counter
from collections.abc import Sequence

from rollout_service.inference.contract import BackendLoad, GenerateRequest, Generation
from rollout_service.inference.routing.contract import Candidate, Decision, Reason


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
    ) -> Decision:
        home = self._homes.get(affinity) if affinity is not None else None
        chosen = next((each for each in candidates if each.backend_id == home), None)
        reason = Reason.HOME
        if chosen is None:
            reason = Reason.LOAD if home is None else Reason.HOMELESS
            chosen = min(candidates, key=self._cost)
            if affinity is not None:
                self._move(affinity, chosen.backend_id)
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
        home = self._homes.pop(affinity, None)
        if home is not None:
            self._residents[home] -= 1

    def forget(self, backend_id: str) -> None:
        self._homes = {affinity: home for affinity, home in self._homes.items() if home != backend_id}
        self._residents.pop(backend_id, None)
        self._last_chosen.pop(backend_id, None)

    def _cost(self, candidate: Candidate) -> tuple[float, bool, int]:
        load = max(candidate.in_flight, self._residents[candidate.backend_id])
        last_chosen = self._last_chosen.get(candidate.backend_id, 0)
        return (load + 1) / candidate.share, not candidate.is_local, last_chosen

    def _move(self, affinity: str, backend_id: str) -> None:
        self.release(affinity)
        self._homes[affinity] = backend_id
        self._residents[backend_id] += 1

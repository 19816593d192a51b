"""Averages over the rollouts of a pool, which start as guesses and follow the observations."""

from dataclasses import dataclass

_LEARNING = 0.05
"""Weight of a new observation in an average; the first ones weigh more."""
_LIGHTEST, _HEAVIEST = 0.25, 4.0
"""Bounds of a rollout's weight, so that one extreme prompt does not outweigh all others."""


@dataclass(slots=True)
class TrackedRollout:
    """One rollout: the engine it is assigned to, its turns so far, and its weight against the others."""

    sticky_backend: str
    weight: float = 1.0
    turns: int = 0


@dataclass(slots=True)
class WorkloadStats:
    """The averages of a pool."""

    turns: float = 8.0
    """Turns of a rollout."""
    first_prompt: float = 1000.0
    """Tokens of a rollout's first prompt."""
    uncached: float = 200.0
    """Prompt tokens that the engine has to read in a turn after the first."""
    sampled: float = 200.0
    """Tokens that such a turn samples."""
    duty_cycle: float = 0.5
    """The fraction of its life that a rollout has a request in flight."""
    _begun: int = 0
    _later_turns: int = 0

    def begin(self, backend_id: str, prompt_tokens: int) -> TrackedRollout:
        """Return a new rollout on a backend, and learn from its first prompt.

        Its weight is the length of that prompt relative to the average, since a prompt takes room and is attended to in
        every turn.
        """
        self._begun += 1
        self.first_prompt += max(_LEARNING, 1 / (self._begun + 1)) * (prompt_tokens - self.first_prompt)
        weight = prompt_tokens / self.first_prompt
        return TrackedRollout(backend_id, max(_LIGHTEST, min(_HEAVIEST, weight)))

    def end(self, rollout: TrackedRollout) -> None:
        """Learn from a rollout that has ended."""
        self.turns += _LEARNING * (rollout.turns - self.turns)

    def learn_later_turn(self, uncached: int, sampled: int) -> None:
        """Learn from the answer to a turn after a rollout's first."""
        self._later_turns += 1
        weight = max(_LEARNING, 1 / (self._later_turns + 1))
        self.uncached += weight * (uncached - self.uncached)
        self.sampled += weight * (sampled - self.sampled)

    def learn_duty_cycle(self, in_flight: int, rollouts: int) -> None:
        """Learn from a request that is sent while this many rollouts are open."""
        if rollouts:
            self.duty_cycle += _LEARNING * (min(1.0, in_flight / rollouts) - self.duty_cycle)

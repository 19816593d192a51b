"""What the rollouts of a pool are like: averages that follow what is seen, from a first guess."""

from dataclasses import dataclass

_LEARNING = 0.05
"""Weight of a new observation in what is averaged; the first ones weigh more."""
_LIGHTEST, _HEAVIEST = 0.25, 4.0


@dataclass(slots=True)
class Rollout:
    """One rollout: where it lives, its turns so far, and what it weighs against the others."""

    home: str
    weight: float = 1.0
    turns: int = 0


@dataclass(slots=True)
class Habits:
    """The averages of a pool."""

    turns: float = 8.0
    """The turns of a rollout."""
    first_prompt: float = 1000.0
    """Tokens of a rollout's first prompt."""
    uncached: float = 200.0
    """Prompt tokens that a turn after the first leaves to be read."""
    sampled: float = 200.0
    """Tokens that such a turn samples."""
    presence: float = 0.5
    """The part of its life in which a rollout is in flight."""
    _begun: int = 0
    _later_turns: int = 0

    def begin(self, home: str, prompt_tokens: int) -> Rollout:
        """A rollout begins. It weighs by its prompt, which takes room and is attended to in every turn."""
        self._begun += 1
        self.first_prompt += max(_LEARNING, 1 / (self._begun + 1)) * (prompt_tokens - self.first_prompt)
        weight = prompt_tokens / self.first_prompt
        return Rollout(home, max(_LIGHTEST, min(_HEAVIEST, weight)))

    def end(self, rollout: Rollout) -> None:
        """A rollout has ended."""
        self.turns += _LEARNING * (rollout.turns - self.turns)

    def later_turn(self, uncached: int, sampled: int) -> None:
        """A turn after a rollout's first was answered."""
        self._later_turns += 1
        weight = max(_LEARNING, 1 / (self._later_turns + 1))
        self.uncached += weight * (uncached - self.uncached)
        self.sampled += weight * (sampled - self.sampled)

    def sent(self, in_flight: int, rollouts: int) -> None:
        """A request was sent while so many rollouts are open."""
        if rollouts:
            self.presence += _LEARNING * (min(1.0, in_flight / rollouts) - self.presence)

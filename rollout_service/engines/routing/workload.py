"""Averages over the rollouts of a pool, and the groups whose samples begin with one prompt.

The averages start as guesses and follow the observations. From the first sample of a group on, the others are expected
where it is, so the next group goes to another engine although most of this one are to come.
"""

from dataclasses import dataclass

from rollout_service.engines.routing.engine_model import EngineModel

_LEARNING = 0.05
"""A new observation's weight in an average; the first ones weigh more."""
_LIGHTEST, _HEAVIEST = 0.25, 4.0
"""Bounds of a rollout's weight against the average, so that one extreme prompt does not outweigh all others."""


@dataclass(slots=True)
class TrackedRollout:
    sticky_backend: str
    prompt: int
    """The hash of its first prompt, which the samples of a group share."""
    weight: float
    """Expected mean length of its prompts, which take room and are attended to in every turn."""
    turns: int = 0


@dataclass(slots=True)
class SampleGroup:
    engine: EngineModel
    """Where those that have not begun are expected."""
    weight: float = 0.0
    """The weight of one of them."""
    missing: float = 0.0
    """The weight of all that have not begun."""
    begun: int = 0
    unfinished: int = 0

    def begin(self, engine: EngineModel, weight: float, samples: float) -> None:
        self.begun += 1
        self.unfinished += 1
        self.weight = weight
        self._expect(engine, weight * max(0.0, samples - self.begun))

    def end(self) -> None:
        self.unfinished -= 1
        if not self.unfinished:
            self._expect(self.engine, 0.0)

    def expected_now(self, engine: EngineModel) -> float:
        """Return the weight expected for one that begins now."""
        return min(self.weight, self.missing) if engine is self.engine else 0.0

    def _expect(self, engine: EngineModel, weight: float) -> None:
        self.engine.expected -= self.missing
        engine.expected += weight
        self.engine, self.missing = engine, weight


@dataclass(slots=True)
class WorkloadStats:
    turns: float = 8.0
    samples: float = 8.0
    """Rollouts that begin with the same prompt."""
    first_prompt: float = 1000.0
    """Tokens of a rollout's first prompt."""
    uncached: float = 200.0
    """Prompt tokens that the engine has to read in a turn after the first."""
    sampled: float = 200.0
    """Tokens that such a turn samples."""
    duty_cycle: float = 0.5
    """The fraction of its life that a rollout has a request in flight."""
    weight: float = 2400.0
    """The weight of an average rollout."""
    _begun: int = 0
    _groups: int = 0
    _later_turns: int = 0

    def begin(self, backend_id: str, prompt: int, prompt_tokens: int) -> TrackedRollout:
        self._begun += 1
        self.first_prompt += max(_LEARNING, 1 / (self._begun + 1)) * (prompt_tokens - self.first_prompt)
        growth = (self.turns - 1) / 2 * (self.uncached + self.sampled)
        self.weight = self.first_prompt + growth
        ratio = (prompt_tokens + growth) / self.weight
        return TrackedRollout(backend_id, prompt, max(_LIGHTEST, min(_HEAVIEST, ratio)) * self.weight)

    def end(self, rollout: TrackedRollout) -> None:
        self.turns += _LEARNING * (rollout.turns - self.turns)

    def end_group(self, group: SampleGroup) -> None:
        self._groups += 1
        self.samples += max(_LEARNING, 1 / (self._groups + 1)) * (group.begun - self.samples)

    def learn_later_turn(self, uncached: int, sampled: int) -> None:
        self._later_turns += 1
        weight = max(_LEARNING, 1 / (self._later_turns + 1))
        self.uncached += weight * (uncached - self.uncached)
        self.sampled += weight * (sampled - self.sampled)

    def learn_duty_cycle(self, in_flight: int, rollouts: int) -> None:
        """Learn from a request that is sent while this many rollouts are open."""
        if rollouts:
            self.duty_cycle += _LEARNING * (min(1.0, in_flight / rollouts) - self.duty_cycle)

"""What a user's turns are usually worth.

Most turns of a policy that has much to learn are bad. If each of them pushed its tokens down, there would be hardly
anything else, which makes a policy collapse. So a turn counts by how much better it was than this user's turns usually
are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class RunningMeans:
    """A running mean of the values for each user, over about as many turns as `memory`."""

    memory: float = 48.0
    means: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def update(self, values: Mapping[str, Sequence[float]]) -> None:
        """Take the values of a batch, by user; they count in the means at once."""
        for user, seen in values.items():
            if not seen:
                continue
            before = min(self.weights.get(user, 0.0), max(0.0, self.memory - len(seen)))
            after = before + len(seen)
            self.means[user] = (self.means.get(user, 0.0) * before + sum(seen)) / after
            self.weights[user] = after

    def of(self, user: str) -> float:
        """Return a user's mean; 0 if nothing is known."""
        return self.means.get(user, 0.0)

    def state(self) -> dict[str, dict[str, float]]:
        """Return what a checkpoint keeps."""
        return {"means": dict(self.means), "weights": dict(self.weights)}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        self.means, self.weights = dict(state["means"]), dict(state["weights"])

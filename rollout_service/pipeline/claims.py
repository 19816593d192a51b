"""The rules by which this node claims rollouts: the cluster's decision, and the pools of sub-agents in service.

Guarantee: a change of the rules wakes the pipeline, so that nothing polls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rollout_service.base.signals import ChangeSignal


class ClaimRules:
    """The environments that this node claims rollouts of, and whether it claims any."""

    def __init__(self, environments: Iterable[str] = ()) -> None:
        """`environments` are the names of this node's environments."""
        self._environments = list(environments)
        self._left: dict[str, str] = {}
        """The environments whose rollouts stay in the store, and the pools of sub-agents that they wait for."""
        self._waits: Mapping[str, float] | None = None
        self._open = True
        self.changed = ChangeSignal()
        """Given after each change."""

    def waits(self, pools: Collection[str]) -> Mapping[str, float] | None:
        """Return how long a rollout of each environment is left to other nodes, in seconds; None: all are claimed now.

        `pools` are those in service. What was left in the store is left out, unless its pool is one of them.
        """
        self._left = {name: pool for name, pool in self._left.items() if pool not in pools}
        if not self._left:
            return self._waits
        waits = dict.fromkeys(self._environments, 0.0) if self._waits is None else self._waits
        return {name: seconds for name, seconds in waits.items() if name not in self._left}

    def leave(self, environment: str, pool: str) -> None:
        """Leave rollouts of an environment in the store until this pool, of their sub-agents, is in service."""
        self._left[environment] = pool

    @property
    def is_open(self) -> bool:
        """Whether rollouts are claimed at all."""
        return self._open

    def suit(self, waits: Mapping[str, float] | None) -> None:
        """Claim only rollouts of these environments."""
        if waits != self._waits:
            self._waits = waits
            self.changed.notify()

    def open(self, is_open: bool) -> None:
        """Claim rollouts, or claim no more."""
        if is_open is not self._open:
            self._open = is_open
            self.changed.notify()

    async def until_open(self) -> None:
        """Wait until rollouts are claimed."""
        while not self._open:
            await self.changed.wait()

"""What this node claims from the store, as the cluster decides it.

Guarantee: whoever changes what may be claimed wakes the pipeline, so that nothing polls.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout_service.signals import ChangeSignal


class ClaimRules:
    """The environments that this node claims rollouts of, and whether it claims any."""

    def __init__(self) -> None:
        self._waits: Mapping[str, float] | None = None
        self._open = True
        self.changed = ChangeSignal()
        """Given after each change."""

    @property
    def waits(self) -> Mapping[str, float] | None:
        """How long a rollout of each environment is left to other nodes, in seconds; None: all are claimed at once."""
        return self._waits

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

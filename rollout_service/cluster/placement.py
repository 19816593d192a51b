"""Which rollouts suit this node: the environments it has, whose labels it has, and whose image is here.

Guarantees: a rollout is never claimed by a node that lacks a label its environment requires, nor by one that lacks its
image while another node has it, however busy that one is. If no node has the image, the rollout waits
`IMAGE_WAIT_SECONDS` for one that does, such as one that was preempted; then any node takes it, and its failure says
what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.store.cluster_contract import Heartbeat
from sandboxes.errors import SandboxError

IMAGE_WAIT_SECONDS = 180.0
"""How long a rollout waits if no node has its image: Slurm holds a requeued job for two minutes."""

LOOK_SECONDS = 30.0
"""How often to look for images; a provider may have to ask a daemon for each."""


@dataclass(slots=True)
class Placement:
    """The environments that suit this node."""

    environments: EnvironmentRegistry
    sandboxes: SandboxSource
    labels: Sequence[str] = ()
    images: Sequence[str] = ()
    """Those whose image was here when it was last looked for, or that need none."""
    _look_again: float = 0.0
    _seen: dict[str, float] = field(default_factory=dict)
    """When a node last had the image of each environment."""

    @property
    def suited(self) -> list[str]:
        """The environments whose labels this node has."""
        return [one.spec.name for one in self.environments.list() if not self.missing_labels(one.spec)]

    def missing_labels(self, spec: EnvironmentSpec) -> list[str]:
        """Return the labels that an environment requires and this node lacks."""
        return sorted(set(spec.sandbox.requires) - set(self.labels))

    async def look(self) -> None:
        """Look for the images of all environments, unless that was done less than `LOOK_SECONDS` ago."""
        if time.monotonic() < self._look_again:
            return
        self._look_again = time.monotonic() + LOOK_SECONDS
        specs = [one.spec for one in self.environments.list() if not self.missing_labels(one.spec)]
        self.images = [spec.name for spec in specs if await self._has_image(spec)]

    async def _has_image(self, spec: EnvironmentSpec) -> bool:
        try:
            await self.sandboxes.check(spec)
        except SandboxError:
            return False
        return True

    def waits(self, beat: Heartbeat) -> Mapping[str, float]:
        """Return the environments whose rollouts this node takes, and how long these must have waited, in seconds."""
        now = time.monotonic()
        self._seen.update({name: now for name, nodes in beat.images.items() if nodes > 0})
        lately = {name for name, seen in self._seen.items() if now - seen < IMAGE_WAIT_SECONDS}
        here = set(self.images)
        takes = [name for name in self.suited if name in here or name not in lately]
        return {name: 0.0 if name in here else IMAGE_WAIT_SECONDS for name in takes}

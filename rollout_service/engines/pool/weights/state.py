"""The weights that the backends of a pool have, and those that they may be given next.

Versions only grow, unless forced; a version names one set of weights; a backend whose weights are not known for certain
does not count as having them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel

from api_schemas.inference import (
    DiskWeights,
    DistributedWeights,
    ExternalWeights,
    KvHandling,
    PauseMode,
    Weights,
    WeightsRequest,
)
from rollout_service.engines.contract import Backend
from rollout_service.engines.errors import BackendRejected, WeightsConflict
from rollout_service.engines.pool.weights.process_groups import require_process_groups


@dataclass(frozen=True, slots=True)
class WeightSet:
    source: Weights
    version: int

    @property
    def is_external(self) -> bool:
        """Loaded by the trainer, without the service."""
        return isinstance(self.source, ExternalWeights)

    async def load(self, backend: Backend, kv: KvHandling) -> None:
        """Load them into a backend; external ones are there already."""
        flush_cache = kv is KvHandling.FLUSHED
        if isinstance(self.source, DiskWeights):
            await backend.update_weights(self.source.path, self.version, flush_cache=flush_cache)
        elif isinstance(self.source, DistributedWeights):
            await require_process_groups(backend).receive_weights(self.source, self.version, flush_cache=flush_cache)


class PoolWeights:
    """`present` is None until the first update."""

    def __init__(self) -> None:
        self.present: WeightSet | None = None
        self.unknown: set[str] = set()
        """Backends in which a failed load may have left anything."""
        self.kept: frozenset[int] = frozenset()
        """Versions loaded while KV of older weights stayed in use."""

    def adopt(self, weights: WeightSet, kv: KvHandling) -> None:
        self.present = weights
        self.kept -= {weights.version}
        if kv is KvHandling.KEPT:
            self.kept |= {weights.version}

    def source_of(self, version: int) -> str:
        """Say where the weights came from; empty if that is unknown."""
        if self.present is None or self.present.version != version:
            return ""
        match self.present.source:
            case DiskWeights(path=path):
                return path
            case DistributedWeights(group_name=group):
                return f"the process group {group}"
            case _:
                return "the trainer"

    @property
    def external_version(self) -> int | None:
        return self.present.version if self.present is not None and self.present.is_external else None

    def replace(self, present: WeightSet | None, kept: Iterable[int], unknown: Iterable[str]) -> None:
        """Adopt another service's record."""
        self.present = present
        self.kept, self.unknown = frozenset(kept), set(unknown)

    def plan_update(self, request: WeightsRequest, versions: Iterable[int]) -> WeightSet | None:
        """Return the weights to load, or None if the pool has them; `versions` are those of the backends."""
        wanted, present = WeightSet(request.weights, request.version), self.present
        newest = present.version if present else max(versions, default=0)
        if request.force:
            return wanted
        if wanted.version < newest:
            raise WeightsConflict(
                f"version {wanted.version} is older than the pool's version {newest}",
                hint=f"Send a version above {newest}, or set `force` to go back.",
                context={"version": newest},
            )
        if present is None or wanted.version > present.version:
            return wanted
        if not _is_same(wanted.source, present.source):
            raise WeightsConflict(
                f"the pool already has a version {wanted.version} from another source",
                hint="Give other weights another version, or set `force` to replace them.",
                context={"version": newest},
            )
        self.present = wanted
        return None

    async def bring_up_to_date(self, backend: Backend, version: int) -> int:
        """Give the pool's weights to a backend that reports `version`, and return its version then."""
        if self.present is None or (version == self.present.version and backend.id not in self.unknown):
            self._refuse_unknown(backend)
            return version
        if isinstance(self.present.source, DistributedWeights):
            raise BackendRejected(
                f"lacks version {self.present.version} of the weights, which came over a process group",
                hint="Load that version or a later one from a folder with POST /v1/weights; then it can join.",
                backend_id=backend.id,
            )
        await self.present.load(backend, KvHandling.FLUSHED)
        self.unknown.discard(backend.id)
        return self.present.version

    def _refuse_unknown(self, backend: Backend) -> None:
        if backend.id in self.unknown:
            raise BackendRejected(
                "has unknown weights, because a load was interrupted",
                hint="Load weights with POST /v1/weights, or restart the engine and register it again.",
                backend_id=backend.id,
            )


def kv_handling(mode: PauseMode) -> KvHandling:
    return KvHandling.KEPT if mode is PauseMode.IN_PLACE else KvHandling.FLUSHED


def _is_same(wanted: Weights, present: Weights) -> bool:
    """Return whether both are the same; a folder may stand for weights that came over a process group."""
    return wanted == present or (isinstance(wanted, DiskWeights) and isinstance(present, DistributedWeights))


class PoolState(BaseModel):
    """The state that a command leaves, as the services that share the pool's engines pass it on.

    A pool that takes it over has the same pause, weights and process groups as the one that carried the command out,
    and gives no request to a backend that the command left without the weights.
    """

    pause: PauseMode | None = None
    source: Weights | None = None
    """None before the first update."""
    version: int = 0
    kept_kv: list[int] = []
    """Versions loaded while KV of older weights stayed in use."""
    unknown: list[str] = []
    """Backends whose weights are not known for certain."""
    groups: dict[str, list[str]] = {}
    """The backends of each group."""
    versions: dict[str, int] = {}
    """The version of each backend in service."""
    out: list[str] = []
    """Backends that the last command took out of service."""

"""Which weights the backends of a pool have, and which they may be given next.

Guarantees: versions only grow, unless forced; one version is one set of weights; a backend whose weights are not
known for sure is not taken for one that has them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from api_schemas.inference import DiskWeights, DistributedWeights, KvHandling, PauseMode, WeightsRequest
from rollout_service.inference.contract import Backend
from rollout_service.inference.errors import BackendRejected, WeightsConflict
from rollout_service.inference.pool.weights.process_groups import require_process_groups

Source = DiskWeights | DistributedWeights


@dataclass(frozen=True, slots=True)
class WeightSet:
    """Weights that every backend of a pool has, or is to have."""

    source: Source
    version: int

    async def load(self, backend: Backend, kv: KvHandling) -> None:
        """Load them into a backend."""
        flush_cache = kv is KvHandling.FLUSHED
        if isinstance(self.source, DiskWeights):
            await backend.update_weights(self.source.path, self.version, flush_cache=flush_cache)
        else:
            await require_process_groups(backend).receive_weights(
                self.source, self.version, flush_cache=flush_cache
            )


class PoolWeights:
    """The weights of one pool; `present` is None until it was given some."""

    def __init__(self) -> None:
        self.present: WeightSet | None = None
        self._unknown: set[str] = set()
        self._kept: frozenset[int] = frozenset()

    def adopt(self, weights: WeightSet, kv: KvHandling) -> None:
        """These are the pool's weights from now on."""
        self.present = weights
        self._kept -= {weights.version}
        if kv is KvHandling.KEPT:
            self._kept |= {weights.version}

    def kept_kv(self, versions: frozenset[int]) -> frozenset[int]:
        """Those of the versions that were loaded while KV of older weights stayed in use."""
        return self._kept & versions

    def mark_unknown(self, backend_id: str) -> None:
        """Loading has failed in a way that may have left anything in the backend."""
        self._unknown.add(backend_id)

    def mark_known(self, backend_id: str) -> None:
        """The backend has what it says."""
        self._unknown.discard(backend_id)

    def is_unknown(self, backend_id: str) -> bool:
        """Whether nobody knows what the backend has."""
        return backend_id in self._unknown

    def plan_update(self, request: WeightsRequest, versions: Iterable[int]) -> WeightSet | None:
        """What to load, or None if it is there already; `versions` are those of the backends.

        Raises:
            WeightsConflict: they are older than the present ones, or others of the same version.
        """
        wanted, present = WeightSet(request.weights, request.version), self.present
        newest = present.version if present else max(versions, default=0)
        if request.force:
            return wanted
        if wanted.version < newest:
            raise WeightsConflict(
                f"the pool has version {newest}, and {wanted.version} is older",
                hint=f"Send a version above {newest}, or `force` to go back",
                context={"version": newest},
            )
        if present is None or wanted.version > present.version:
            return wanted
        if not _is_same(wanted.source, present.source):
            raise WeightsConflict(
                f"version {wanted.version} of the pool came from elsewhere",
                hint="Give other weights another version, or `force` to replace them",
                context={"version": newest},
            )
        self.present = wanted
        return None

    async def bring_up_to_date(self, backend: Backend, version: int) -> int:
        """Let a backend that says that it has `version` have the pool's weights; gives the version then.

        Raises:
            BackendRejected: they came over a process group, and cannot be had again.
        """
        if self.present is None or (version == self.present.version and backend.id not in self._unknown):
            self._refuse_unknown(backend)
            return version
        if isinstance(self.present.source, DistributedWeights):
            raise BackendRejected(
                f"has not version {self.present.version} of the weights, which came over a process group",
                hint="Load that version from a folder, or a later one, with POST /v1/weights: then it comes in",
                backend_id=backend.id,
            )
        await self.present.load(backend, KvHandling.FLUSHED)
        self.mark_known(backend.id)
        return self.present.version

    def _refuse_unknown(self, backend: Backend) -> None:
        if backend.id in self._unknown:
            raise BackendRejected(
                "has weights that are not known: loading others into it was interrupted",
                hint="Load weights with POST /v1/weights, or restart it and register it again",
                backend_id=backend.id,
            )


def kv_handling(mode: PauseMode) -> KvHandling:
    """What becomes of the KV of older weights when requests were paused by `mode`."""
    return KvHandling.KEPT if mode is PauseMode.IN_PLACE else KvHandling.FLUSHED


def _is_same(wanted: Source, present: Source) -> bool:
    """A folder may be named for what came over a process group, so that other backends can have it too."""
    return wanted == present or (isinstance(wanted, DiskWeights) and isinstance(present, DistributedWeights))

"""Process groups for weight broadcasts: which backends are in which group, at which ranks.

A trainer broadcasts its tensors from rank 0 of a torch process group; each accelerator of each backend is a rank. A
group is used only while exactly the backends in service are in it and none has left service since it joined, because a
broadcast never ends if one does not take part.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, starmap
from typing import Protocol, runtime_checkable

import anyio

from api_schemas.inference import DistributedWeights, WeightsGroupRequest
from rollout_service.engines.contract import Backend
from rollout_service.engines.errors import BackendRejected, WeightsConflict
from rollout_service.engines.pool.backend_handle import BackendHandle

_RETRY_SECONDS = 0.2
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}  # all others have one byte


@runtime_checkable
class SupportsProcessGroups(Protocol):
    """Its methods raise the errors of `Backend`."""

    async def ranks(self) -> int:
        """Return one for each of its accelerators."""

    async def join_group(self, group: WeightsGroupRequest, first_rank: int) -> None:
        """Wait for all others to join."""

    async def leave_group(self, name: str) -> None: ...

    async def receive_weights(self, weights: DistributedWeights, version: int, *, flush_cache: bool = True) -> None: ...


def require_process_groups(backend: Backend) -> SupportsProcessGroups:
    if not isinstance(backend, SupportsProcessGroups):
        raise BackendRejected(
            "cannot take weights from a process group",
            hint='Load them from a folder: {"source": {"type": "disk", "path": ...}}.',
            backend_id=backend.id,
        )
    return backend


class ProcessGroups:
    def __init__(self) -> None:
        self._backends: dict[str, frozenset[str]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._backends

    def all(self) -> dict[str, list[str]]:
        return {name: sorted(present) for name, present in self._backends.items()}

    def replace(self, groups: Mapping[str, Iterable[str]]) -> None:
        self._backends = {name: frozenset(present) for name, present in groups.items()}

    def add(self, name: str, backend_ids: Iterable[str]) -> None:
        self._backends[name] = frozenset(backend_ids)

    def remove(self, name: str) -> None:
        self._backends.pop(name, None)

    def forget(self, backend_id: str) -> None:
        """Drop the groups of a backend that was away, since it may have restarted."""
        for name, present in list(self._backends.items()):
            if backend_id in present:
                del self._backends[name]

    def check(self, name: str, backend_ids: Iterable[str]) -> None:
        expected, present = frozenset(backend_ids), self._backends.get(name)
        if present == expected:
            return
        what = f"has no group {name!r}"
        if present is not None:
            missing, gone = sorted(expected - present), sorted(present - expected)
            what = f"has a group {name!r} that lacks {missing} and includes {gone}, which are out of service"
        raise WeightsConflict(
            f"the pool {what}", hint="Let the backends in service join a new one with POST /v1/weights/group."
        )


async def assign_ranks(handles: Sequence[BackendHandle], group: WeightsGroupRequest) -> dict[BackendHandle, range]:
    counts = [await require_process_groups(handle.backend).ranks() for handle in handles]
    bounds = list(accumulate(counts, initial=group.rank_offset))
    if (size := bounds[-1]) != group.world_size:
        raise WeightsConflict(
            f"world_size is {group.world_size}, but {group.rank_offset} ranks of the trainer and {counts} of the "
            f"backends make {size}",
            hint=f"Set world_size to {size}, for the trainer as well.",
        )
    return dict(zip(handles, starmap(range, pairwise(bounds)), strict=True))


async def wait_for_master(group: WeightsGroupRequest) -> None:
    """Wait until the trainer listens, because an engine that joins a group stops all its work to wait for it."""
    address = f"{group.master_address}:{group.master_port}"
    with anyio.move_on_after(group.timeout_seconds):
        while True:
            try:
                stream = await anyio.connect_tcp(group.master_address, group.master_port)
            except (OSError, UnicodeError):  # nobody listens yet, or a name that no domain can have
                await anyio.sleep(_RETRY_SECONDS)
                continue
            await stream.aclose()
            return
    raise WeightsConflict(
        f"nothing listens at {address}",
        hint="Let the trainer's rank 0 join the group first, or at the same time.",
    )


def buckets(weights: DistributedWeights) -> Iterator[DistributedWeights]:
    """Yield buckets in order, of about `bucket_bytes` with at least one tensor each."""
    start, size = 0, 0
    for index, (dtype, shape) in enumerate(zip(weights.dtypes, weights.shapes, strict=True)):
        bytes_ = _ITEM_BYTES.get(dtype, 1) * math.prod(shape)
        if index > start and size + bytes_ > weights.bucket_bytes:
            yield _part(weights, start, index)
            start, size = index, 0
        size += bytes_
    yield _part(weights, start, len(weights.names))


def _part(weights: DistributedWeights, start: int, end: int) -> DistributedWeights:
    return weights.model_copy(
        update={name: getattr(weights, name)[start:end] for name in ("names", "dtypes", "shapes")}
    )

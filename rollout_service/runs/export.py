"""A run as JSON Lines, group by group.

Guarantees: reading an export returns exactly the service's data. One group is in memory at a time, and nothing is
compressed on the event loop. The export of a run that is still running contains the groups that were closed when the
export started. A run that asks for neither sub-agents nor live sessions is exported in the format 1.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence

import anyio.to_thread

from api_schemas.exports import ExportedNode, ExportedRun, ExportedSample, ExportEnd, ExportLine
from api_schemas.rollouts.trees import NodeDetail
from rollout_service.runs.api import RunService
from rollout_service.store.runs_contract import RunStore

GZIP = 16 + zlib.MAX_WBITS
_LEVEL = 1


class RunExporter:
    """Exports runs."""

    def __init__(self, runs: RunStore, run_service: RunService) -> None:
        self._runs = runs
        self._run_service = run_service

    async def start(self, run_id: str, *, compressed: bool) -> AsyncIterator[bytes]:
        """Return the pieces of the file.

        Raises:
            NotFoundError: There is no such run; raised before the first piece.
        """
        run = await self._run_service.get(run_id)
        is_plain = run.request.nodes is NodeDetail.NONE and run.request.live is None
        head = ExportedRun(format=1 if is_plain else 2, run=run)
        return self._pieces(run_id, head, await self._runs.closed_groups(run_id), compressed=compressed)

    async def _pieces(
        self, run_id: str, head: ExportedRun, groups: Sequence[int], *, compressed: bool
    ) -> AsyncIterator[bytes]:
        packer = zlib.compressobj(_LEVEL, wbits=GZIP) if compressed else None
        yield _packed(_line(head), packer)
        count = 0
        for number in groups:
            for sample in await self._runs.exported_samples(run_id, number):
                count += 1
                yield await anyio.to_thread.run_sync(_packed_sample, sample, packer)
        yield _packed(_line(ExportEnd(samples=count)), packer)
        if packer is not None:
            yield packer.flush()


def _line(model: ExportLine) -> bytes:
    return model.model_dump_json().encode() + b"\n"


def _packed_sample(sample: ExportedSample, packer: zlib._Compress | None) -> bytes:
    """Return the line of a sample and those of its rollout's sub-agents."""
    rollout = sample.sample.rollout
    if rollout.nodes:
        bare = sample.sample.model_copy(update={"rollout": rollout.model_copy(update={"nodes": []})})
        sample = sample.model_copy(update={"sample": bare})
    nodes = (ExportedNode(rollout_id=rollout.rollout_id, node=node) for node in rollout.nodes)
    return _packed(b"".join([_line(sample), *map(_line, nodes)]), packer)


def _packed(line: bytes, packer: zlib._Compress | None) -> bytes:
    return line if packer is None else packer.compress(line)

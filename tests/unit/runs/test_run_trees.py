"""A run delivers and exports sub-agents if it asks for them, and only then."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from api_schemas.exports import ExportedSample
from api_schemas.rollouts import TokenExtras
from api_schemas.rollouts.trees import NodeDetail
from api_schemas.runs import Batch, InlineTasks, RunRequest
from api_schemas.tasks import Task
from rollout_client.arrays import BatchArrays
from rollout_client.run_export import BadExportError, RunExport
from rollout_service.runs import Delivery
from rollout_service.runs.api import RunExporter
from rollout_service.store.runs_contract import BatchLeaseRequest
from rollout_service.store.sqlite import SqliteStore
from tests.support.run_bench import LEASE, arrays_of, run_manager, run_service
from tests.support.store.trees import WORK, bare, rollout


class Bench:
    """A store with a run of one group, whose rollouts each have two sub-agents."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.manager = run_manager(store, places=8, version=lambda: 3)
        self.delivery = Delivery(store.runs, lambda _: self.manager)
        self._service = run_service(store, self.manager)

    async def roll_out(self, detail: NodeDetail) -> None:
        """Create the run and complete its rollouts."""
        source = InlineTasks(tasks=[Task(environment="calc")])
        request = RunRequest(run_id="a", source=source, batch_size=1, group_size=2, filters=[], nodes=detail, version=3)
        await self.store.runs.create(request, tasks=1, digest=None, version=3)
        left = 2
        while left:
            await self.store.wait_for_work()
            for lease in await self.store.claim("w", limit=2, lease_seconds=1e6):
                assert lease.request.exports == TokenExtras(nodes=detail)
                assert await self.store.finish(lease, "w", rollout(lease.rollout_id))
                left -= 1
        seen = 0
        while not await self.store.runs.closed_groups("a"):
            seen = await self.store.runs.wait_for_change(seen)

    async def batch(self) -> tuple[bytes, bytes]:
        """Lease the batch; return it as JSON and as arrays, and give it back."""
        leased = await self.delivery.lease(BatchLeaseRequest("a", "k", 60), version=None, timeout=30)
        told = b"".join([part async for part in self.delivery.as_json(leased)])
        arrays = await arrays_of(self.delivery, leased)
        await self.delivery.give_back("a", leased.batch_id)
        return told, arrays

    async def export(self, path: Path) -> list[dict[str, Any]]:
        """Export the run; return the lines."""
        pieces = await RunExporter(self.store.runs, self._service).start("a", compressed=False)
        data = b"".join([piece async for piece in pieces])
        await anyio.Path(path).write_bytes(data)
        return [json.loads(line) for line in data.splitlines()]


@asynccontextmanager
async def bench(detail: NodeDetail) -> AsyncIterator[Bench]:
    with anyio.fail_after(60):
        async with await SqliteStore.open(":memory:") as store:
            made = Bench(store)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(made.manager.manage, LEASE)
                await made.roll_out(detail)
                yield made
                tasks.cancel_scope.cancel()


@pytest.mark.parametrize("detail", [NodeDetail.SUMMARY, NodeDetail.TOKENS])
async def test_a_batch_has_the_sub_agents_that_its_run_asks_for(detail):
    async with bench(detail) as it:
        told, arrays = await it.batch()
        batch = Batch.model_validate_json(told)
        for sample in batch.groups[0].samples:
            nodes = rollout(sample.rollout.rollout_id).nodes
            assert sample.rollout.nodes == (nodes if detail is NodeDetail.TOKENS else bare(nodes))
            assert sample.rollout.work == WORK
        read = BatchArrays.from_bytes(arrays)
        assert [one.rollout.nodes for one in read.batch.groups[0].samples] == [
            one.rollout.nodes for one in batch.groups[0].samples
        ]
        assert read.tensors["token_ids"].tolist() == [0, 1, 2] * 2, "only the root has columns"
        again, arrays_again = await it.batch()
        first, second = json.loads(told), json.loads(again)
        assert first["groups"] == second["groups"]
        assert told[: told.index(b'],"batch_id"')] == again[: again.index(b'],"batch_id"')]
        assert len(arrays) == len(arrays_again)


async def test_an_export_of_format_2_has_a_line_for_each_sub_agent(tmp_path):
    async with bench(NodeDetail.TOKENS) as it:
        told, _ = await it.batch()
        delivered = [one.rollout for one in Batch.model_validate_json(told).groups[0].samples]
        lines = await it.export(tmp_path / "a.jsonl")
        assert [line["kind"] for line in lines] == ["run", *(["sample", "node", "node"] * 2), "end"]
        assert (lines[0]["format"], lines[0]["run"]["request"]["nodes"]) == (2, "tokens")
        assert "nodes" not in lines[1]["sample"]["rollout"]
        assert lines[1]["sample"]["rollout"]["work"]["critical_steps"] == WORK.critical_steps
        samples = [ExportedSample.model_validate(line) for line in lines if line["kind"] == "sample"]
        assert len(samples) == lines[-1]["samples"] == 2, "a reader may skip the lines that it does not know"
        assert lines[2]["rollout_id"] == lines[1]["request"]["rollout_id"]
        assert [one.sample.rollout for one in RunExport(tmp_path / "a.jsonl").samples()] == delivered


async def test_a_damaged_export_of_format_2_is_never_a_smaller_tree(tmp_path):
    async with bench(NodeDetail.SUMMARY) as it:
        path = tmp_path / "a.jsonl"
        await it.export(path)
        lines = path.read_bytes().splitlines(keepends=True)
        for end in range(1, len(lines)):
            path.write_bytes(b"".join(lines[:end]))
            read = []
            with pytest.raises(BadExportError, match="truncated"):
                read.extend(RunExport(path).samples())
            assert all(len(one.sample.rollout.nodes) == 2 for one in read)
        path.write_bytes(b"".join([lines[0], lines[2], *lines[1:]]))
        with pytest.raises(BadExportError, match="is not after its rollout"):
            list(RunExport(path).samples())


NOT_ASKED = {
    "nodes",
    "work",
    "nodes_by_reference",
    "auxiliary",
    "reward_weights",
    "measured_on",
    "filtered_on",
}


def names_in(value: object) -> set[str]:
    """Return the names of all fields in JSON, at any depth."""
    if isinstance(value, list):
        return set().union(*map(names_in, value))
    return value.keys() | names_in(list(value.values())) if isinstance(value, dict) else set()


async def test_what_was_not_asked_for_is_not_there(tmp_path):
    async with bench(NodeDetail.NONE) as it:
        told, _ = await it.batch()
        lines = await it.export(tmp_path / "a.jsonl")
        assert not (names_in(json.loads(told)) | names_in(lines)) & NOT_ASKED
        assert lines[0]["format"] == 1
        assert [line["kind"] for line in lines] == ["run", "sample", "sample", "end"]
        assert len(list(RunExport(tmp_path / "a.jsonl").samples())) == 2

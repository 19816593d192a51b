"""Over HTTP, a store that cannot be read or written gives a 503 with a hint, and no data is lost."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import httpx

from api_schemas.errors import Problem
from api_schemas.runs import InlineTasks, RunRequest
from rollout_service.server.lifecycle import Service
from tests.support.gateway.service import gateway_service


@asynccontextmanager
async def served(state: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """Run a service in this process, without an engine, whose database gives up on locks after 20 ms."""
    with anyio.fail_after(120):
        async with gateway_service(state, []) as running, running.http() as client:
            service: Service = running.app.state.service
            await service.store._thread.read(lambda db: db.execute("PRAGMA busy_timeout = 20").fetchone())
            yield client, service


async def create(service: Service, run_id: str) -> None:
    request = RunRequest(run_id=run_id, source=InlineTasks(open=True), batch_size=1)
    await service.store.runs.create(request, tasks=0, digest=None, version=0)


def refused(response: httpx.Response) -> Problem:
    problem = Problem.model_validate_json(response.content)
    assert (response.status_code, problem.code) == (503, "store_unavailable")
    return problem


async def test_a_database_that_another_program_holds(tmp_path):
    async with served(tmp_path) as (client, service):
        await create(service, "held")
        with closing(sqlite3.connect(tmp_path / "rollouts.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for method, path in (
                ("POST", "/v1/runs/held/lease"),
                ("PATCH", "/v1/runs/held"),
                ("DELETE", "/v1/runs/held"),
            ):
                body = {"version": 1} if method == "PATCH" else None
                problem = refused(await client.request(method, path, json=body))
                assert problem.retryable
                assert "close it" in problem.detail
            assert any("locked" in reason for reason in (await client.get("/ready")).json()["reasons"])
            assert (await client.get("/v1/runs/held")).json()["state"] == "running", "it can still be read"
            other.execute("ROLLBACK")
        assert (await client.patch("/v1/runs/held", json={"version": 1})).json()["version"] == 1
        assert (await client.delete("/v1/runs/held")).json()["state"] == "ended"


async def test_a_database_that_is_damaged(tmp_path):
    database = tmp_path / "rollouts.sqlite3"
    async with served(tmp_path) as (client, service):
        for number in range(50):
            await create(service, f"r{number}")
        await service.store._thread.read(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
        whole = database.read_bytes()
        database.write_bytes(whole[:8192].ljust(len(whole), b"Z"))
        await service.store._thread.read(lambda db: db.execute("PRAGMA shrink_memory").fetchall())
        for method, path in (("GET", "/v1/runs"), ("GET", "/v1/runs/r7"), ("POST", "/v1/runs/r7/lease")):
            problem = refused(await client.request(method, path))
            assert "restore a backup" in problem.detail
        assert any("restore" in reason for reason in (await client.get("/ready")).json()["reasons"])
        assert (await client.get("/health")).status_code == 200
        database.write_bytes(whole)
        await service.store._thread.read(lambda db: db.execute("PRAGMA shrink_memory").fetchall())
        assert len((await client.get("/v1/runs")).json()["runs"]) == 50, "a copy that is put back is used"

"""A context of the code interpreter is restarted whatever runs in it, and refuses what no shell can run."""

from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import orjson
import pytest
from starlette.routing import Router

from rollout_service.base.errors import RequestError
from rollout_service.server.e2b import code_interpreter
from rollout_service.server.e2b.boxes import CURRENT_BOX


async def test_a_restart_ends_what_runs_and_bash_takes_no_nul(local_sandbox):
    box: Any = SimpleNamespace(sandbox=local_sandbox, contexts={}, most_seconds=1000.0)
    CURRENT_BOX.set(box)
    transport = httpx.ASGITransport(Router(code_interpreter.routes()))
    found: list[str] = []

    async def run(code: str) -> None:
        answer = await client.post("/execute", json={"code": code, "language": "bash"})
        found.extend(orjson.loads(line).get("name", "") for line in answer.text.splitlines())

    async with httpx.AsyncClient(transport=transport, base_url="http://box") as client:
        await run("x=1")
        found.clear()
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, "sleep 1000")
                await anyio.wait_all_tasks_blocked()
                assert (await client.post("/contexts/bash/restart")).status_code == 200
        assert "SessionDiedError" in found
        found.clear()
        await run('[[ -z "$x" ]]')
        assert not any(found)
        with pytest.raises(RequestError, match="NUL"):
            await run("echo a\0b")

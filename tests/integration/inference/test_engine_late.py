"""Rollouts requested before the engine is up wait and lose nothing, and whoever submitted them is told."""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.abc import Process

from api_schemas.nodes import NodePatch, StagePatch
from api_schemas.rollouts import Rollout, RolloutState
from rollout_client.client import RolloutClient
from rollout_service.cli.server_child import stop
from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Replies, ScriptedEngine
from sandboxes.host.ports import free_port

pytestmark = pytest.mark.anyio

MODEL = policy_folder("calc-tuned")
COMMAND = [sys.executable, "-m", "rollout_service.cli"]


def engine(port: int = 0) -> ScriptedEngine:
    return ScriptedEngine(Replies.from_texts(["The answer is 42.<|im_end|>"], MODEL), model_path=MODEL, port=port)


@asynccontextmanager
async def service(folder: Path, *flags: str) -> AsyncIterator[RolloutClient]:
    """Run a server, and yield a client once it answers, whether or not it is ready."""
    address = folder / "address"
    address.unlink(missing_ok=True)
    command = [*COMMAND, "serve", "--sandbox", "local", "--engine", "none", "--port", "0", *flags]
    command += ["--state-dir", str(folder), "--port-file", str(address)]
    with (folder / "server.log").open("ab") as log:
        process = await anyio.open_process(command, stdin=None, stdout=log, stderr=log)
    try:
        async with httpx.AsyncClient() as http:
            with anyio.fail_after(60):
                while not (address.exists() and await _answers(http, address.read_text())):
                    assert process.returncode is None, (folder / "server.log").read_text()
                    await anyio.sleep(0.05)
        async with RolloutClient(address.read_text()) as client:
            yield client
    finally:
        with anyio.CancelScope(shield=True):
            await stop(process)


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/health")).is_success
    except httpx.TransportError:
        return False


@asynccontextmanager
async def submitting(folder: Path, url: str, count: int) -> AsyncIterator[tuple[Process, Path]]:
    """Run `submit` on rollouts that have one second for `init`; yield its process and its log file."""
    async with RolloutClient(url) as client:
        instances = await client.dataset("math", limit=count)
    tasks = [{"environment": "math", "instance": instance} for instance in instances]
    lines = [{"task": task, "limits": {"init_seconds": 1}} for task in tasks]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    command = [*COMMAND, "submit", str(folder / "tasks.jsonl"), "-o", str(folder / "results.jsonl")]
    with (folder / "submit.log").open("wb") as log:
        process = await anyio.open_process([*command, "--url", url], stdin=None, stdout=log, stderr=log)
    try:
        yield process, folder / "submit.log"
    finally:
        with anyio.CancelScope(shield=True):
            await stop(process)


async def said(log: Path, text: str) -> None:
    with anyio.fail_after(40):
        while text not in await anyio.Path(log).read_text():
            await anyio.sleep(0.05)


async def metrics(client: RolloutClient) -> dict[str, str]:
    """Return the values by series."""
    async with httpx.AsyncClient(base_url=client.base_url) as http:
        text = (await http.get("/metrics")).text
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


async def test_an_engine_of_the_settings_that_is_missing_is_in_warnings_and_metrics(tmp_path: Path) -> None:
    async with (
        engine() as present,
        service(tmp_path, "--backend", present.url, "--backend", "http://127.0.0.1:9") as client,
    ):
        with anyio.fail_after(60):
            while not (found := await client.readiness()).ready:
                await anyio.sleep(0.05)
        assert "policy@127.0.0.1:9 could not be registered: " in "".join(found.warnings)
        figures = await metrics(client)
        up = {name: value for name, value in figures.items() if name.startswith("rollout_backend_up")}
        assert sorted(up.values()) == ["0.0", "1.0"]
        assert up['rollout_backend_up{backend="policy@127.0.0.1:9",pool="policy"}'] == "0.0"
        assert figures["rollout_ready"] == "1.0"


async def test_orders_wait_for_their_engine_and_lose_nothing_by_it(tmp_path: Path) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    async with (
        service(tmp_path, "--backend", address) as client,
        submitting(tmp_path, client.base_url, 12) as (submit, log),
    ):
        await said(log, "Waiting: no backend is in service")
        assert f"Waiting for policy@127.0.0.1:{port}" in log.read_text()
        await anyio.sleep(2)
        assert (await client.page()).counts == {RolloutState.QUEUED: 12}
        assert not (await client.readiness()).ready
        figures = await metrics(client)
        assert figures[f'rollout_backend_up{{backend="policy@127.0.0.1:{port}",pool="policy"}}'] == "0.0"
        assert (figures["rollout_ready"], figures["rollout_queued"]) == ("0.0", "12.0")
        async with engine(port):
            with anyio.fail_after(60):
                await submit.wait()
        lines = (tmp_path / "results.jsonl").read_text().splitlines()
        results = [Rollout.model_validate_json(line) for line in lines]
        assert submit.returncode == 0
        assert {(each.state, each.attempt) for each in results} == {(RolloutState.COMPLETED, 1)}
        assert len(results) == 12
        await said(tmp_path / "server.log", "backend lost")
        await said(tmp_path / "server.log", "backend registered")
        figures = await metrics(client)
        assert figures['rollout_backends{pool="policy",state="failed"}'] == "1.0"
        assert figures['rollout_backends{pool="policy",state="ready"}'] == "0.0"
        assert figures[f'rollout_backend_weight_version{{backend="policy@127.0.0.1:{port}",pool="policy"}}'] == "0.0"
        assert float(figures["rollout_store_bytes"]) > 10_000
        assert (figures["rollout_store_failing"], figures["rollout_store_errors_total"]) == ("0.0", "0.0")
        assert any(name.startswith("rollout_disk_free_bytes") for name in figures)


async def test_concurrency_is_changed_while_the_service_works(tmp_path: Path) -> None:
    async with service(tmp_path, "--init-workers", "2") as client:
        before = await client.node()
        assert (before.init.workers, before.init.working) == (2, 0)
        patch = NodePatch(rollout=StagePatch(workers=40), evaluate=StagePatch(queue=7))
        after = await client.update_node(patch)
        assert (after.rollout.workers, after.evaluate.queue, after.init.workers) == (40, 7, 2)
        grown = 40 - before.rollout.workers + 7 - before.evaluate.queue
        assert after.sandboxes.ceiling == before.sandboxes.ceiling + grown, "it follows while it is not set"
        async with httpx.AsyncClient(base_url=client.base_url) as http:
            for body, path in (
                ({"rollout": {"workers": 0}}, "body.rollout.workers"),
                ({"sandboxes": {"ceiling": 1}}, "body.sandboxes.ceiling"),
                ({"rollout": {"worker": 5}}, "body.rollout.worker"),
            ):
                answer = await http.patch("/v1/node", json=body | {"init": {"workers": 9}})
                assert answer.status_code == 422
                assert [error["path"] for error in answer.json()["errors"]] == [path]
            metrics = (await http.get("/metrics")).text
        assert 'rollout_stage_limit{kind="workers",stage="rollout"} 40.0' in metrics
        assert 'rollout_stage_limit{kind="workers",stage="init"} 2.0' in metrics, "a refusal changes nothing"
        command = [*COMMAND, "nodes", "set", "--max-sandboxes", "5", "--json", "--url", client.base_url]
        shown = json.loads((await anyio.run_process(command)).stdout)
        assert (shown["sandboxes"]["ceiling"], shown["rollout"]["workers"]) == (5, 40)
        (node,) = await client.nodes()
        assert (node.ceiling, node.target) == (5, min(5, node.target))


async def test_addresses_of_backends_are_checked_before_anything_is_asked(tmp_path: Path) -> None:
    async with service(tmp_path) as client, httpx.AsyncClient(base_url=client.base_url) as http:
        for address in ("http://127.0.0.1:9/?key=1", "http://me:secret@127.0.0.1:9", "http://127.0.0.1:9/#x"):
            answer = await http.post("/v1/backends", json={"url": address})
            assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "body.url")
            answer = await http.post("/add_llm_server", json={"address": address})
            assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "body.address")


async def test_a_named_environment_that_cannot_be_used_keeps_the_service_from_starting(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "environment.toml").write_text('name = "mine"\nprompt = "{{ instance.q "\n')
    command = [*COMMAND, "serve", "--sandbox", "local", "--engine", "none", "--port", "0"]
    command += ["--state-dir", str(tmp_path / "state"), "--environment", str(mine), "--environment", "/nowhere"]
    with anyio.fail_after(60):
        ended = await anyio.run_process(command, check=False)
    said = (ended.stdout + ended.stderr).decode()
    assert ended.returncode == 3, said
    assert "\nerror: there is no environment at /nowhere. Name a folder " in said
    assert f"\n{mine}/environment.toml: " in said
    assert "Traceback" not in said
    assert "startup complete" not in said

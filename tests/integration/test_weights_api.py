"""Callers who hang up: an update is carried to its end, a rollout is durable, a cancelled one ends in the engine."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from aiohttp import web

import rollout_service.policies
from api_schemas.inference import DiskWeights, PauseMode
from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.tasks import Task
from rollout_service.cli.child import running_server
from rollout_service.client import RolloutClient
from rollout_service.client_errors import ConflictError
from rollout_service.inference.fakes import Replies, ScriptedEngine

pytestmark = pytest.mark.anyio

MODEL = Path(rollout_service.policies.__file__).parent / "calc-tuned"


class Engine(ScriptedEngine):
    """Answers one turn that ends a rollout, and takes its time to load weights."""

    load_seconds = 0.0

    def __init__(self) -> None:
        script = Replies.from_texts(["The answer is 42.<|im_end|>"], MODEL)
        super().__init__(script, model_path=MODEL)

    async def _update(self, body) -> web.Response:
        await anyio.sleep(self.load_seconds)
        return await super()._update(body | {"model_path": str(MODEL)})


@asynccontextmanager
async def serving(engine: Engine, state: Path) -> AsyncIterator[tuple[RolloutClient, httpx.AsyncClient]]:
    config = state / "rollout.toml"
    config.write_text('hold_seconds = 60\n[sandbox]\nprovider = "local"\n')
    flags = ["--config", str(config), "--engine", "none", "--backend", engine.url, "--log-level", "warning"]
    async with running_server(state, flags) as client:
        address = client.base_url
        async with httpx.AsyncClient(base_url=address, timeout=0.3) as impatient:
            yield client, impatient


async def until(condition, seconds: float = 20) -> None:
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.005)


async def order(client: RolloutClient, rollout_id: str) -> RolloutRequest:
    (instance,) = await client.dataset("calc", limit=1)
    return RolloutRequest(rollout_id=rollout_id, task=Task(environment="calc", instance=instance))


async def test_callers_who_hang_up(tmp_path: Path) -> None:
    async with Engine() as engine, serving(engine, tmp_path) as (client, impatient):
        await an_update_goes_on(engine, client, impatient)
        await a_rollout_goes_on(engine, client, impatient)
        await a_cancelled_rollout_ends_in_the_engine(engine, client)


async def an_update_goes_on(engine, client, impatient) -> None:
    engine.load_seconds = 1.0
    with pytest.raises(httpx.ReadTimeout):
        await impatient.post("/v1/weights", json={"path": "/w/5", "version": 5})
    assert engine.version == "default"
    await until(lambda: engine.version == "5" and not engine.paused)
    engine.load_seconds = 0.0
    again = await client.update_weights("/w/5", 5)
    assert (again.changed, again.version) == (False, 5)
    with pytest.raises(ConflictError, match="has version 5, and 4 is older"):
        await client.update_weights(DiskWeights(path="/w/4"), 4)
    outcome = await client.update_weights("/w/6", 6, mode=PauseMode.IN_PLACE)
    assert outcome.outcomes[0].steps.keys() == {"pause", "load", "resume"}


async def a_rollout_goes_on(engine, client, impatient) -> None:
    engine.latency = 1.0
    request = await order(client, "durable")
    with pytest.raises(httpx.ReadTimeout):
        await impatient.post("/v1/rollouts", params={"wait": 30}, json=request.model_dump(mode="json"))
    rollout = await client.wait("durable", timeout_seconds=30)
    assert rollout.state is RolloutState.COMPLETED
    trajectory = await client.trajectory("durable")
    assert {version for segment in trajectory.segments for version in segment.versions} == {-1, 6}
    assert trajectory.kept_kv_versions == [], "it began after the update in place"


async def a_cancelled_rollout_ends_in_the_engine(engine, client) -> None:
    engine.latency = 60.0
    await client.submit(await order(client, "cancelled"))
    await until(lambda: engine.in_flight)
    started = time.perf_counter()
    await client.cancel("cancelled")
    await until(lambda: not engine.in_flight, seconds=1.0)
    assert time.perf_counter() - started < 1.0
    assert engine.aborts[-1] != "*"
    rollout = await client.wait("cancelled", timeout_seconds=30)
    assert rollout.state is RolloutState.CANCELLED

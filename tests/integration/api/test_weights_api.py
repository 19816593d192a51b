"""A weight update over HTTP returns an error if an engine refuses it, and continues if its caller hangs up.

A rollout continues too; if it is cancelled, its request also ends in the engine.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from aiohttp import web

from api_schemas.inference import DiskWeights, PauseMode
from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_client.errors import ConflictError, OrderError, WeightsError
from rollout_client.sync import SyncRolloutClient
from rollout_service.cli.server_child import running_server
from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Replies, ScriptedEngine
from tests.support.waiting import until

MODEL = policy_folder("calc-tuned")


class Engine(ScriptedEngine):
    """An engine that answers with one turn, which ends the rollout, and takes `load_seconds` to load weights."""

    load_seconds = 0.0
    answers_load = 200
    answers_pause = 200

    @property
    def id(self) -> str:
        return self.url.replace("http://", "policy@")

    def __init__(self) -> None:
        script = Replies.from_texts(["The answer is 42.<|im_end|>"], MODEL)
        super().__init__(script, model_path=MODEL)

    async def _update(self, body) -> web.Response:
        await anyio.sleep(self.load_seconds)
        if self.answers_load != 200:
            message = {"success": False, "message": "no such folder"}
            return web.json_response(message, status=self.answers_load)
        return await super()._update(body | {"model_path": str(MODEL)})

    async def _pause(self, body) -> web.Response:
        if self.answers_pause != 200:
            return web.json_response({"message": "not now"}, status=self.answers_pause)
        return await super()._pause(body)


@asynccontextmanager
async def serving(*engines: Engine, state: Path) -> AsyncIterator[tuple[RolloutClient, httpx.AsyncClient]]:
    config = state / "rollout.toml"
    config.write_text('hold_seconds = 60\n[sandbox]\nprovider = "local"\n')
    flags = ["--config", str(config), "--engine", "none"]
    for engine in engines:
        flags += ["--backend", engine.url]
    async with running_server(state, flags) as client:
        address = client.base_url
        async with httpx.AsyncClient(base_url=address, timeout=0.3) as impatient:
            yield client, impatient


async def order(client: RolloutClient, rollout_id: str) -> RolloutRequest:
    (instance,) = await client.dataset("calc", limit=1)
    return RolloutRequest(rollout_id=rollout_id, task=Task(environment="calc", instance=instance))


async def test_callers_who_hang_up(tmp_path):
    async with Engine() as engine, serving(engine, state=tmp_path) as (client, impatient):
        await an_update_goes_on(engine, client, impatient)
        await a_rollout_goes_on(engine, client, impatient)
        await a_cancelled_rollout_ends_in_the_engine(engine, client)


async def test_weights_that_engines_did_not_take_are_an_error(tmp_path):
    async with (
        Engine() as first,
        Engine() as second,
        serving(first, second, state=tmp_path) as (client, plain),
    ):
        await until_ready(client, 2)
        await weights_that_all_refuse(first, second, client, plain)
        await weights_that_all_lose(first, second, client)
        await until_ready(client, 2)
        await weights_that_one_loses(first, second, client)
        await until_ready(client, 2)
        await a_pause_that_one_ignores(first, second, client)


async def until_ready(client, number: int) -> None:
    with anyio.fail_after(30):
        while [view.state for view in await client.backends()] != ["ready"] * number:
            await anyio.sleep(0.05)


async def weights_that_all_refuse(first, second, client, plain) -> None:
    first.answers_load = second.answers_load = 400
    with pytest.raises(WeightsError, match="no such folder") as caught:
        await client.update_weights("/nope", 9)
    problem, outcome = caught.value.problem, caught.value.outcome
    assert (problem.status, problem.code, problem.retryable) == (422, "weights_refused", False)
    assert (outcome.changed, [each.ok for each in outcome.outcomes]) == (False, [False, False])
    assert [each.version_after for each in outcome.outcomes] == [0, 0]
    assert [view.state for view in await client.backends()] == ["ready", "ready"]
    answer = await plain.post("/v1/weights", json={"path": "/nope", "version": 9}, timeout=30)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")

    def push() -> None:
        with SyncRolloutClient(client.base_url) as blocking, pytest.raises(WeightsError):
            blocking.update_weights("/nope", 9)

    await anyio.to_thread.run_sync(push)


async def weights_that_all_lose(first, second, client) -> None:
    first.answers_load = second.answers_load = 500
    with pytest.raises(WeightsError) as caught:
        await client.update_weights("/w/1", 1)
    assert (caught.value.problem.status, caught.value.problem.code) == (502, "weights_not_loaded")
    assert [each.version_after for each in caught.value.outcome.outcomes] == [None, None]
    first.answers_load = second.answers_load = 200
    assert (await client.update_weights("/w/1", 1)).changed


async def weights_that_one_loses(first, second, client) -> None:
    second.answers_load = 500
    with pytest.raises(WeightsError, match="out of service until") as caught:
        await client.update_weights("/w/2", 2)
    assert (caught.value.problem.status, caught.value.problem.code) == (424, "weights_partly_loaded")
    outcome = caught.value.outcome
    assert (outcome.changed, outcome.version) == (True, 2)
    versions = {each.backend_id: each.version_after for each in outcome.outcomes}
    assert versions == {first.id: 2, second.id: None}
    states = {view.backend_id: view.state for view in await client.backends()}
    assert states == {first.id: "ready", second.id: "failed"}
    again = await client.update_weights("/w/2", 2)
    codes = {each.backend_id: each.code for each in again.outcomes}
    assert (again.changed, codes) == (False, {first.id: None, second.id: "out_of_service"})
    second.answers_load = 200
    await until(lambda: second.version == "2")
    assert first.version == "2"


async def a_pause_that_one_ignores(first, second, client) -> None:
    first.answers_pause = 400
    with pytest.raises(OrderError, match="could not pause everywhere") as caught:
        await client.pause()
    assert caught.value.problem.code == "order_failed"
    obeyed = {each.backend_id: each.ok for each in caught.value.outcome.outcomes}
    assert obeyed == {first.id: False, second.id: True}
    first.answers_pause = 200
    assert all(each.ok for each in (await client.resume()).outcomes)


async def an_update_goes_on(engine, client, impatient) -> None:
    engine.load_seconds = 1.0
    with pytest.raises(httpx.ReadTimeout):
        await impatient.post("/v1/weights", json={"path": "/w/5", "version": 5})
    assert engine.version == "default"
    await until(lambda: engine.version == "5" and not engine.paused)
    engine.load_seconds = 0.0
    again = await client.update_weights("/w/5", 5)
    assert (again.changed, again.version) == (False, 5)
    with pytest.raises(ConflictError, match="version 4 is older than the pool's version 5"):
        await client.update_weights(DiskWeights(path="/w/4"), 4)
    outcome = await client.update_weights("/w/6", 6, mode=PauseMode.IN_PLACE)
    assert outcome.outcomes[0].steps.keys() == {"pause", "load", "resume", "try"}


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

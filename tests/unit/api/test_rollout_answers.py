"""Answers about a rollout, to who submits it again and to readers who wait for it."""

from dataclasses import fields
from types import SimpleNamespace

import anyio
import pytest
from fastapi import Request

from api_schemas.external import RolloutEnd
from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.rollouts.trees import NodeDetail
from rollout_service.base.errors import ConflictError
from rollout_service.base.shutdown import Shutdown
from rollout_service.engines.errors import NoBackendError
from rollout_service.gateway.external import ExternalAgents
from rollout_service.server.api.routes.rollouts import get_rollout
from rollout_service.server.lifecycle.service import Service
from rollout_service.store.sqlite import SqliteStore
from tests.support.store.trees import bare, order, rollout


def service(store: SqliteStore, **parts: object) -> Service:
    """Return a service without the parts that nothing asks for."""
    there = {"store": store, "shutdown": Shutdown(0), "external": ExternalAgents()} | parts
    return Service(**dict.fromkeys((one.name for one in fields(Service)), None) | there)


def refuse(pool: str) -> None:
    raise NoBackendError(f"pool {pool!r} has no backend")


async def test_a_known_rollout_is_returned_although_it_could_not_begin_any_more():
    async with await SqliteStore.open(":memory:") as store:
        elsewhere = SimpleNamespace(runs_elsewhere=lambda _: True)
        it = service(store, environments=(), suitability=elsewhere, serving=SimpleNamespace(check=refuse))
        with pytest.raises(NoBackendError):
            await it.submit(order(rollout_id="r"))
        await store.submit(order(rollout_id="r"))
        assert (await it.submit(order(rollout_id="r"))).state is RolloutState.QUEUED
        with pytest.raises(ConflictError):
            await it.submit(order(NodeDetail.TOKENS, "r"))


@pytest.mark.parametrize("attempt", [1, None])
async def test_a_report_may_be_repeated_whatever_became_of_the_rollout(attempt):
    async with await SqliteStore.open(":memory:") as store:
        await store.submit(order(rollout_id="r"))
        (lease,) = await store.claim("w", limit=1, lease_seconds=100)
        it, report = service(store), RolloutEnd(reward=1.0, attempt=attempt)
        episode, access = SimpleNamespace(request=order(rollout_id="r"), attempt=1), SimpleNamespace(url="", key="k")
        agent = it.external.begin(episode, access, "policy")
        await it.end("r", report)
        assert agent.reported.is_set()
        it.external.end("r")
        await it.end("r", report)
        await store.finish(lease, "w", rollout("r"))
        await it.end("r", report)
        with pytest.raises(ConflictError):
            await it.end("r", RolloutEnd(reward=0.0, attempt=attempt))
        again = it.external.begin(episode, access, "policy")  # of another rollout with this id
        it.external.report("r", report)
        assert again.reported.is_set()


async def test_the_answer_after_a_wait_is_as_light_as_one_without():
    async with await SqliteStore.open(":memory:") as store, anyio.create_task_group() as tasks:
        await store.submit(order(NodeDetail.TOKENS, "r"))
        read: list[Rollout] = []

        async def wait() -> None:
            http = Request({"type": "http"}, anyio.sleep_forever)
            answer = await get_rollout(service(store), http, "r", trajectory=False, wait=60, until="ended")
            read.append(Rollout.model_validate_json(answer.body))

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        (lease,) = await store.claim("w", limit=1, lease_seconds=100)
        await store.finish(lease, "w", rollout("r"))
    assert (read[0].nodes, read[0].trajectory) == (bare(rollout("r").nodes), None)

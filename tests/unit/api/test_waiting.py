"""Answers to readers who wait for a rollout."""

from dataclasses import fields

import anyio
from fastapi import Request

from api_schemas.rollouts import Rollout
from api_schemas.rollouts.trees import NodeDetail
from rollout_service.base.shutdown import Shutdown
from rollout_service.gateway.external import ExternalAgents
from rollout_service.server.api.routes.rollouts import get_rollout
from rollout_service.server.lifecycle.service import Service
from rollout_service.store.sqlite import SqliteStore
from tests.support.store.trees import bare, order, rollout


async def test_the_answer_after_a_wait_is_as_light_as_one_without():
    async with await SqliteStore.open(":memory:") as store, anyio.create_task_group() as tasks:
        parts = {"store": store, "shutdown": Shutdown(0), "external": ExternalAgents()}
        service = Service(**dict.fromkeys((one.name for one in fields(Service)), None) | parts)
        await store.submit(order(NodeDetail.TOKENS, "r"))
        read: list[Rollout] = []

        async def wait() -> None:
            http = Request({"type": "http"}, anyio.sleep_forever)
            answer = await get_rollout(service, http, "r", trajectory=False, wait=60, until="ended")
            read.append(Rollout.model_validate_json(answer.body))

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        (lease,) = await store.claim("w", limit=1, lease_seconds=100)
        await store.finish(lease, "w", rollout("r"))
    assert (read[0].nodes, read[0].trajectory) == (bare(rollout("r").nodes), None)

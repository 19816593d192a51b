"""A server has an embedded engine for each of two pools: weights go to the policy alone; no run trains the other."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from api_schemas.inference import WeightsGroupRequest
from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_client.errors import ConflictError, InvalidRequestError
from rollout_client.sync import SyncRolloutClient
from rollout_service.cli.server_child import running_server
from rollout_service.engines.shipped import policy_folder

FLAGS = ("--sandbox", "local", "--model", "calc-base", "--pool-model", "frozen-1=calc-tuned")


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[RolloutClient]:
    (folder / "rollout.toml").write_text("")
    async with running_server(folder, ["--config", str(folder / "rollout.toml"), *FLAGS]) as client:
        yield client


async def task(client: RolloutClient) -> Task:
    (instance,) = await client.dataset("calc", limit=1)
    return Task(environment="calc", instance=instance)


async def test_two_embedded_pools_of_which_one_is_frozen(tmp_path):
    async with served(tmp_path) as client:
        await both_pools_answer(client)
        await weights_go_to_the_policy_alone(client)
        await a_run_does_not_train_the_frozen_one(client)
        await a_pause_of_the_policy_leaves_the_frozen_one_at_work(client)
        async with httpx.AsyncClient(base_url=client.base_url) as http:
            metrics = (await http.get("/metrics")).text
        assert 'rollout_frozen_version_changes_total{pool="frozen-1"} 0.0' in metrics
        assert 'rollout_frozen_version_changes_total{pool="policy"}' not in metrics


async def versions(client: RolloutClient) -> dict[str, int]:
    return {view.pool: view.weight_version for view in await client.backends()}


async def both_pools_answer(client: RolloutClient) -> None:
    models = {view.pool: Path(view.model_path).name for view in await client.backends()}
    assert models == {"policy": "calc-base", "frozen-1": "calc-tuned"}
    for pool in models:
        rollout = await client.run(RolloutRequest(task=await task(client), pool=pool))
        assert (rollout.state, rollout.pool) == (RolloutState.COMPLETED, pool)


async def weights_go_to_the_policy_alone(client: RolloutClient) -> None:
    path = str(policy_folder("calc-base"))
    await client.update_weights(path, 3)
    assert await versions(client) == {"policy": 3, "frozen-1": 0}
    with pytest.raises(ConflictError, match="'frozen-1' is frozen") as caught:
        await client.update_weights(path, 4, pool="frozen-1")
    assert caught.value.problem.code == "pool_frozen"
    assert caught.value.problem.status == 409
    group = WeightsGroupRequest(
        pool="frozen-1", master_address="127.0.0.1", master_port=9, world_size=2, timeout_seconds=1
    )
    with pytest.raises(ConflictError, match="'frozen-1' is frozen"):
        await client.join_weights_group(group)

    def update() -> None:
        with SyncRolloutClient(client.base_url) as blocking:
            blocking.update_weights(path, 4, pool="frozen-1")

    with pytest.raises(ConflictError, match="'frozen-1' is frozen"):
        await anyio.to_thread.run_sync(update)
    assert await versions(client) == {"policy": 3, "frozen-1": 0}


async def a_run_does_not_train_the_frozen_one(client: RolloutClient) -> None:
    run = RunRequest(source=InlineTasks(tasks=[await task(client)]), pool="frozen-1", batch_size=1)
    with pytest.raises(InvalidRequestError, match="frozen") as caught:
        await client.create_run(run)
    assert caught.value.problem.status == 422
    assert [error.path for error in caught.value.problem.errors] == ["body.pool"]
    assert await client.runs() == []


async def a_pause_of_the_policy_leaves_the_frozen_one_at_work(client: RolloutClient) -> None:
    await client.pause()
    rollout = await client.run(RolloutRequest(task=await task(client), pool="frozen-1"))
    assert rollout.state is RolloutState.COMPLETED
    assert {view.pool: view.state for view in await client.backends()} == {
        "policy": "paused",
        "frozen-1": "ready",
    }
    await client.resume()

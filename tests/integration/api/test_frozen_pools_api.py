"""A server has an embedded engine for each of two pools: weights go to the policy alone; no run trains the other."""

from pathlib import Path

import pytest

from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.tasks import Task
from rollout_client.errors import ConflictError, InvalidRequestError
from rollout_service.cli.server_child import running_server
from rollout_service.engines.shipped import policy_folder

FLAGS = ("--sandbox", "local", "--model", "calc-base", "--pool-model", "frozen-1=calc-tuned")


async def test_two_embedded_pools_of_which_one_is_frozen(tmp_path):
    async with running_server(tmp_path, FLAGS) as client:
        models = {view.pool: Path(view.model_path).name for view in await client.backends()}
        assert models == {"policy": "calc-base", "frozen-1": "calc-tuned"}
        (instance,) = await client.dataset("calc", limit=1)
        task = Task(environment="calc", instance=instance)
        for pool in models:
            rollout = await client.run(RolloutRequest(task=task, pool=pool))
            assert (rollout.state, rollout.pool) == (RolloutState.COMPLETED, pool)
        path = str(policy_folder("calc-base"))
        await client.update_weights(path, 3)
        with pytest.raises(ConflictError, match="'frozen-1' is frozen"):
            await client.update_weights(path, 4, pool="frozen-1")
        assert {view.pool: view.weight_version for view in await client.backends()} == {"policy": 3, "frozen-1": 0}
        with pytest.raises(InvalidRequestError, match="frozen") as refused:
            await client.create_run(RunRequest(source=InlineTasks(tasks=[task]), pool="frozen-1", batch_size=1))
        assert [error.path for error in refused.value.problem.errors] == ["body.pool"]
        assert await client.runs() == []

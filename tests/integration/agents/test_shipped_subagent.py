"""The shipped `parl-base` as the sub-agent of `pointers` and `split`, on a real engine behind a real server."""

from pathlib import Path

import anyio
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.rollouts import Rollout, RolloutRequest, TokenExtras
from api_schemas.rollouts.trees import NodeDetail
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_service.engines.shipped import policy_folder
from tests.support.api.server import api_server
from tests.support.processes.service import running, scripted_engine
from tests.support.turns import called, handed_on, turn_of
from tests.support.waiting import collect

POLICY = str(policy_folder("parl-base"))
ROLLOUTS = 16
POINTERS = {
    "question": "Add K M.",
    "names": ["K", "M"],
    "cells": {"K": "Q7", "M": "B2", "Q7": "37", "B2": "90"},
}
SPLIT = {
    "question": "Add all.",
    "names": ["Q7", "B2", "M0", "X4"],
    "cells": {"Q7": "37", "B2": "90", "M0": "11", "X4": "52"},
}


def finished(answer: str) -> str:
    return turn_of(called("finish", answer=answer))


async def roll_out(folder: Path, environment: str, instance: dict[str, object], *turns: str) -> list[Rollout]:
    """Return rollouts of a scripted orchestrator whose sub-agents are the shipped policy."""
    embedded = ["rollout_service.engines.kinds.embedded", "--model", POLICY]
    embedded += ["--port-file", str(folder / "frozen.address")]
    with (
        scripted_engine(folder, *turns, model=POLICY) as policy,
        running("frozen", embedded, folder) as frozen,
        api_server(folder, "--backend", policy.url) as server,
    ):
        url = HttpUrl(f"http://127.0.0.1:{frozen.url}")
        task = Task.model_validate({"environment": environment, "instance": instance})
        request = RolloutRequest(task=task, exports=TokenExtras(nodes=NodeDetail.SUMMARY))
        done: list[Rollout] = []
        async with RolloutClient(server.url) as client:
            await client.add_backend(BackendSpec(url=url, pool="frozen-1"))
            async with anyio.create_task_group() as tasks:
                for _ in range(ROLLOUTS):
                    tasks.start_soon(collect, done, lambda: client.run(request))
    return done


@pytest.mark.parametrize(
    ("environment", "instance", "turns", "results", "steps"),
    [
        (
            "pointers",
            POINTERS,
            (handed_on("K", "M", system="Follow the pointer."), finished("37+90")),
            ["37", "90"],
            5,
        ),
        (
            "split",
            SPLIT,
            (
                turn_of(called("index")),
                handed_on("Q7 B2", "M0", "X4", system="Read each key."),
                finished("37+90+11+52"),
            ),
            ["37+90", "11", "52"],
            6,
        ),
    ],
    ids=["pointers", "split"],
)
async def test_the_shipped_subagent_reads_what_it_is_told(tmp_path, environment, instance, turns, results, steps):
    rollouts = await roll_out(tmp_path, environment, instance, *turns)
    assert [rollout.error for rollout in rollouts] == [None] * ROLLOUTS
    given = [[node.result for node in rollout.nodes or []] for rollout in rollouts]
    assert sum(one == results for one in given) >= 0.75 * ROLLOUTS
    in_time = [(rollout, one) for rollout, one in zip(rollouts, given, strict=True) if rollout.reward == 1.0]
    assert len(in_time) >= 0.75 * ROLLOUTS
    # A sub-agent that reads less than it was told to takes fewer steps.
    planned = [rollout.work for rollout, one in in_time if one == results]
    assert {work.scheduled_steps for work in planned if work} == {steps}

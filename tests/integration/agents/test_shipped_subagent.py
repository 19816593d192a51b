"""The shipped `parl-base` as the sub-agent of `pointers` and `split`, on a real engine behind a real server."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.support.processes.children import killed
from tests.support.waiting import collect

POLICY = str(policy_folder("parl-base"))
START_SECONDS = 60.0
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


def called(*calls: tuple[str, dict[str, str]]) -> str:
    """Return a turn of the policy that calls tools."""
    told = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in told) + "<|im_end|>"


def assigned(system: str, *tasks: str) -> str:
    """Return a turn that assigns all tasks to a new sub-agent."""
    create = ("create_subagent", {"name": "a", "system_prompt": system})
    return called(create, *(("assign_task", {"agent": "a", "prompt": task}) for task in tasks))


@contextmanager
def engine(address: Path, *command: str) -> Iterator[str]:
    """Run an engine that writes its port to a file; yield its URL."""
    arguments = [sys.executable, "-m", *command, "--model", POLICY, "--port-file", str(address)]
    with killed(subprocess.Popen(arguments, stdout=subprocess.DEVNULL)) as process:
        deadline = time.monotonic() + START_SECONDS
        while not address.exists() or not address.read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"http://127.0.0.1:{address.read_text().strip()}"


async def roll_out(folder: Path, environment: str, instance: dict[str, object], *turns: str) -> list[Rollout]:
    """Return rollouts of a scripted orchestrator whose sub-agents are the shipped policy."""
    script = [part for turn in turns for part in ("--turn", turn)]
    with (
        engine(folder / "policy", "rollout_service.testing", *script) as policy,
        engine(folder / "frozen", "rollout_service.engines.kinds.embedded") as frozen,
        api_server(folder, "--backend", policy) as server,
    ):
        task = Task.model_validate({"environment": environment, "instance": instance})
        request = RolloutRequest(task=task, exports=TokenExtras(nodes=NodeDetail.SUMMARY))
        done: list[Rollout] = []
        async with RolloutClient(server.url) as client:
            await client.add_backend(BackendSpec(url=HttpUrl(frozen), pool="frozen-1"))
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
            (assigned("Follow the pointer.", "K", "M"), called(("finish", {"answer": "37+90"}))),
            ["37", "90"],
            5,
        ),
        (
            "split",
            SPLIT,
            (
                called(("index", {})),
                assigned("Read each key.", "Q7 B2", "M0", "X4"),
                called(("finish", {"answer": "37+90+11+52"})),
            ),
            ["37+90", "11", "52"],
            6,
        ),
    ],
    ids=["pointers", "split"],
)
async def test_the_shipped_subagent_reads_what_it_is_told(
    tmp_path, environment, instance, turns, results, steps
):
    rollouts = await roll_out(tmp_path, environment, instance, *turns)
    assert [rollout.error for rollout in rollouts] == [None] * ROLLOUTS
    given = [[node.result for node in rollout.nodes or []] for rollout in rollouts]
    assert sum(one == results for one in given) >= 0.75 * ROLLOUTS
    in_time = [(rollout, one) for rollout, one in zip(rollouts, given, strict=True) if rollout.reward == 1.0]
    assert len(in_time) >= 0.75 * ROLLOUTS
    # A sub-agent that reads less than it was told to takes fewer steps.
    planned = [rollout.work for rollout, one in in_time if one == results]
    assert {work.scheduled_steps for work in planned if work} == {steps}

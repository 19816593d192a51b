"""A run with filters and a staleness bound, whose agent is a program with OpenAI's package in its sandbox."""

import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import anyio
import pytest

from api_schemas.runs import DatasetTasks, FilterSpec, GroupSample, Run, RunRequest
from rollout_client.client import ClientRun, InvalidRequestError
from rollout_client.run_export import RunExport
from rollout_service.authoring.attacks import Attack, attack_environment
from rollout_service.cli.env.check import check_environment
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.testing import Reply, ScriptedEngine
from rollout_service.tokens import ChatRenderer
from tests.support.gateway.service import END, POLICY, GatewayService, gateway_service
from tests.support.samples import sampled_of_one
from tests.support.waiting import until

RIGHT, WRONG = "one two three four five six seven right", "one two three four five six seven wrong"
PROGRAM = """
import os, sys
from openai import OpenAI

messages = [{"role": "user", "content": sys.argv[1]}]
with OpenAI() as client, client.chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=messages, stream=True
) as stream:
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="")
"""
ENVIRONMENT = """
name = "counting"
image = "base"

[harness]
name = "command"
command = ["%s", "agent.py", "$prompt"]

[init]
command = "cp /environment/agent.py ."

[evaluate]
command = "/environment/evaluate"
sandbox = "same"

[dataset]
path = "tasks.jsonl"
"""
GRADER = """#!/bin/bash
[[ $(<"$ROLLOUT_ANSWER") == *right ]] && reward=1 || reward=0
echo "{\\"reward\\": $reward}" >"$ROLLOUT_RESULT"
"""
TASKS, STALENESS = 4, 4


class Alternating:
    """A script of right and wrong answers by turns."""

    def __init__(self) -> None:
        renderer = ChatRenderer.load(POLICY)
        self._replies = cycle(Reply(renderer.encode(f"{text}{END}")) for text in (RIGHT, WRONG))

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        del input_ids, budget
        return next(self._replies)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    folder = tmp_path / "counting"
    folder.mkdir()
    (folder / "environment.toml").write_text(ENVIRONMENT % sys.executable)
    (folder / "agent.py").write_text(PROGRAM)
    (folder / "evaluate").write_text(GRADER)
    (folder / "evaluate").chmod(0o755)
    (folder / "tasks.jsonl").write_text(
        "".join(f'{{"question": "Count to {n}.", "split": "train"}}\n' for n in range(TASKS))
    )
    return folder


def order(**more: object) -> RunRequest:
    return RunRequest.model_validate(
        {
            "run_id": "counted",
            "source": DatasetTasks(environment="counting", split="train", epochs=None),
            "group_size": 4,
            "batch_size": 1,
            "max_concurrent": 2,
            "max_staleness": STALENESS,
            "filters": [FilterSpec(name="zero_variance")],
        }
        | more
    )


async def train(service: GatewayService, run: ClientRun, engine: ScriptedEngine) -> list[GroupSample]:
    """Train as a trainer does, and update the weights while answers are sampled.

    It ends with the first batch that has an answer of two versions, but not before the third. An update interrupts one
    mostly, but not always: the answer may end just before.
    """
    samples: list[GroupSample] = []
    version = 0
    async for batch in run.batches():
        assert batch.batch.oldest_version is not None
        assert batch.batch.version - batch.batch.oldest_version <= STALENESS
        for group in batch.groups:
            assert {sample.reward for sample in group.samples} == {0.0, 1.0}
            samples += group.samples
        await batch.ack()
        if batch.batch.number >= 2 and any(
            len(set(sampled_of_one(sample.rollout.trajectory)[1])) > 1 for sample in samples
        ):
            break
        version += 1
        with anyio.move_on_after(5):
            await until(lambda: engine.in_flight)
        await anyio.sleep(0.2)  # a few tokens
        await service.client.update_weights(str(POLICY), version)
    return samples


@pytest.mark.timeout(300)
async def test_a_run_trains_a_program_that_notices_no_update(tmp_path, environment):
    renderer, exported = ChatRenderer.load(POLICY), tmp_path / "run.jsonl"
    async with (
        ScriptedEngine(Alternating(), model_path=POLICY, vocab_size=512, latency=1.0) as engine,
        gateway_service(tmp_path / "state", [engine], environments=[environment]) as service,
    ):
        run = await service.client.create_run(order())
        samples = await train(service, run, engine)
        await run.end()
        await run.export(exported)
        [again] = await run.rescore([str(samples[0].rollout.rollout_id)])
    found = [sampled_of_one(sample.rollout.trajectory) for sample in samples]
    for sample, (ids, versions) in zip(samples, found, strict=True):
        text = RIGHT if sample.reward else WRONG
        assert sample.rollout.program.output == text
        assert ids == renderer.encode(f"{text}{END}")
        assert versions == sorted(versions)
    assert any(len(set(versions)) > 1 for _, versions in found)
    kept = {one.sample.rollout.rollout_id: one.sample for one in RunExport(exported).samples()}
    assert [kept[sample.rollout.rollout_id] for sample in samples] == samples
    assert "cannot be replayed" in again.error.message


async def test_a_run_has_no_external_agents(tmp_path, environment):
    async with gateway_service(tmp_path / "state", [], environments=[environment]) as service:
        with pytest.raises(InvalidRequestError) as caught:
            await service.client._connection.call(
                Run, "POST", "/v1/runs", {**order().model_dump(mode="json"), "agent": "external"}
            )
    assert [error.path for error in caught.value.problem.errors] == ["body.agent"]


async def test_attacks_take_the_place_of_the_program(provider, environment):
    attacks = [Attack("idle", "does nothing", ""), Attack("answer", "answers rightly", "", answer=RIGHT)]
    done: list[int] = []
    report = await attack_environment(
        load_folder(environment), SandboxSource(provider), attacks=attacks, on_outcome=done.append
    )
    assert done == [1, 2]
    assert report.idle_reward == 0.0
    assert [outcome.reward for outcome in report.outcomes] == [0.0, 1.0]


def test_a_check_names_the_program(environment):
    report = check_environment(str(environment))
    assert (report.harness, report.tools, report.instances) == ("command", [], TASKS)

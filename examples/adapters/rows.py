"""Print what each trainer gets for one task. This needs a running service, but none of the trainers.

    .venv/bin/rollout-service serve
    .venv/bin/python examples/adapters/rows.py verl slime    # or skyrl, areal, openrlhf, nemo_gym; all by default
    .venv/bin/python examples/adapters/rows.py verl --task '{"environment": "math", "instance": {...}}'

The other files of this folder plug into the trainers themselves.
"""

import argparse
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import anyio

from rollout_client.adapters import areal, nemo_gym, openrlhf, skyrl, slime, verl
from rollout_client.adapters.samples import samples_of
from rollout_client.adapters.submit import RolloutSubmitter, parse_task

TASK = '{"environment": "calc", "instance": {"question": "What is 12*7?", "answer": 84}}'


class Status(Enum):
    """A stand-in for slime's `Sample.Status`."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class Sample:
    prompt: str
    index: int = 0
    group_index: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)


Sample.Status = Status  # type: ignore[attr-defined]


async def for_verl(submitter: RolloutSubmitter, row: dict[str, Any]) -> Any:
    """Return the fields of an AgentLoopOutput."""
    rollout = await submitter.run_scored(submitter.request(row))
    rows = verl.rows_of(rollout, prompt_length=1_024, response_length=2_048)
    return verl.output_fields(rows[0], rollout, rows)


async def for_slime(submitter: RolloutSubmitter, row: dict[str, Any]) -> Any:
    """Return the fields of each sample of a rollout."""
    del submitter  # slime's hook finds the service by ROLLOUT_URL
    filled = await slime.generate(SimpleNamespace(), Sample("", metadata=row), {"max_new_tokens": 512})
    return [vars(one) for one in filled]


async def for_skyrl(submitter: RolloutSubmitter, row: dict[str, Any]) -> Any:
    """Return a GeneratorOutput for a batch of two."""
    batch = {"prompts": [[], []], "env_extras": [row, row], "trajectory_ids": ["a_0", "a_1"]}
    return await skyrl.BatchGenerator(submitter).generate(batch)


async def for_areal(submitter: RolloutSubmitter, row: dict[str, Any]) -> Any:
    """Return the columns of an episode, before they become tensors."""
    return areal.padded(samples_of(await submitter.run_scored(submitter.request(row))))


async def for_openrlhf(submitter: RolloutSubmitter, row: dict[str, Any]) -> Any:
    """Return an executor's response."""
    return await openrlhf.Executor(submitter).execute(json.dumps(row), None, SimpleNamespace(), 2_048, None, None)


async def for_nemo_gym(submitter: RolloutSubmitter, row: dict[str, Any]) -> Any:
    """Return the response of an agent's `/run`."""
    return await nemo_gym.run(submitter, row | {"responses_create_params": {"input": []}})


TRAINERS: dict[str, Callable[[RolloutSubmitter, dict[str, Any]], Awaitable[Any]]] = {
    "verl": for_verl,
    "slime": for_slime,
    "skyrl": for_skyrl,
    "areal": for_areal,
    "openrlhf": for_openrlhf,
    "nemo_gym": for_nemo_gym,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainers", nargs="*", metavar="TRAINER", default=list(TRAINERS))
    parser.add_argument("--task", default=TASK, help="a task as JSON")
    arguments = parser.parse_args()
    row = parse_task(arguments.task).model_dump(mode="json")

    if unknown := set(arguments.trainers) - set(TRAINERS):
        parser.error(f"no adapter for {', '.join(unknown)}; there are {', '.join(TRAINERS)}")

    async def show() -> dict[str, Any]:
        submitter = RolloutSubmitter.from_environment()
        try:
            return {name: await TRAINERS[name](submitter, row) for name in arguments.trainers}
        finally:
            await submitter.aclose()
            await slime.engines().submitter.aclose()

    print(json.dumps(anyio.run(show), default=str))


if __name__ == "__main__":
    main()

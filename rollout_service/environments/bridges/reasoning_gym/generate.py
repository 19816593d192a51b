"""Makes tasks of reasoning-gym, as instances of the environment: `python -m` this module.

Guarantee: the same options give the same instances, and each says all that is needed to make it again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import anyio

from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError, did_you_mean
from rollout_service.environments.bridges.process import LibraryProcess, library_process, run_while_installing
from rollout_service.environments.libraries import Library

NAME: Final = "reasoning-gym"
TASKS: Final = "tasks.jsonl"
WORKER: Final = Path(__file__).with_name("worker.py")
LEFT_OUT: Final = frozenset({"coin_flip", "game_of_life_halting"})
"""Tasks whose scorer gives full marks to answers that are not right."""
GENERATE_SECONDS: Final = 300.0
SHIPPED_SEEDS: Final = {"train": 20_261, "held_out": 7_020_261}
"""Far apart: the library makes instance i of seed s like instance 0 of seed s + i."""
SHIPPED_SPLITS: Final = {"train": 4, "held_out": 1}


async def task_names(process: LibraryProcess) -> list[str]:
    names = (await process.ask({"op": "generate"}, GENERATE_SECONDS))["tasks"]
    return [name for name in names if name not in LEFT_OUT]


async def generate(
    process: LibraryProcess, task: str, *, seed: int, size: int, config: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    made = {"task": task, "seed": seed, "size": size, "config": config or {}}
    reply = await process.ask({"op": "generate", **made}, GENERATE_SECONDS)
    return [
        {**entry, **made, "module": reply["module"], "index": index} for index, entry in enumerate(reply["entries"])
    ]


async def shipped(python: Path) -> AsyncIterator[dict[str, Any]]:
    """Yield the data set: some instances of every task, for each split."""
    async with library_process([python, "-I", WORKER], NAME) as process:
        for task in await task_names(process):
            seen: set[str] = set()
            for split, size in SHIPPED_SPLITS.items():
                for instance in await generate(process, task, seed=SHIPPED_SEEDS[split], size=size):
                    if instance["question"] not in seen:
                        seen.add(instance["question"])
                        yield {**instance, "split": split}


def write_tasks(folder: Path) -> None:

    async def write() -> None:
        async with await anyio.open_file(folder / TASKS, "w") as file:
            async for instance in shipped(folder / "bin" / "python"):
                await file.write(json.dumps(instance) + "\n")

    run_while_installing(write, f"the tasks of {NAME} cannot be made")


REASONING_GYM: Final = Library(NAME, Path(__file__).with_name("requirements.lock"), prepare=write_tasks)


async def print_tasks(task: str, seed: int, size: int, config: dict[str, Any]) -> None:
    async with library_process([REASONING_GYM.python(), "-I", WORKER], NAME) as process:
        known = await task_names(process)
        if task not in known:
            raise ConfigurationError(
                f"there is no task {task!r} that can be scored{did_you_mean(task, known)}",
                hint=f"Its tasks: {', '.join(known)}.",
            )
        for instance in await generate(process, task, seed=seed, size=size, config=config):
            sys.stdout.write(json.dumps(instance) + "\n")


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description="Make tasks of reasoning-gym, one JSON object a line.")
    parser.add_argument("task", help="the name of a task, such as countdown")
    parser.add_argument("--size", type=_size, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=_config, default={}, help="more options of the task, as JSON")
    options = parser.parse_args()
    try:
        anyio.run(print_tasks, options.task, options.seed, options.size, options.config)
    except (ConfigurationError, EnvironmentFailedError) as error:
        parser.error(f"{error}\n{error.hint}".rstrip())


if __name__ == "__main__":
    main()

"""TextArena as a library of its own, with a data set of its games that is made when it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import anyio

from rollout_service.environments.bridges.process import library_process
from rollout_service.environments.libraries import Library
from rollout_service.errors import ConfigurationError, EnvironmentFailedError

NAME: Final = "textarena"
TASKS: Final = "tasks.jsonl"
"""The file of the data set, in the folder of the installed library."""
WORKER: Final = Path(__file__).with_name("worker.py")
LIST_SECONDS: Final = 300.0
SEEDS: Final = {"train": range(1, 17), "held_out": range(1_001, 1_005)}
"""The seeds of each game in the data set, by split."""


def write_tasks(folder: Path) -> None:
    """Write the data set, while the library is installed.

    Raises:
        ConfigurationError: The library does not work.
    """

    async def games() -> list[str]:
        async with library_process([folder / "bin" / "python", "-I", WORKER], NAME) as process:
            found: list[str] = (await process.ask({"op": "games"}, LIST_SECONDS))["games"]
            return found

    try:
        names = anyio.run(games)
    except EnvironmentFailedError as error:
        raise ConfigurationError(f"the games of {NAME} cannot be listed: {error}", hint=error.hint) from error
    lines = (
        json.dumps({"game": name, "seed": seed, "split": split})
        for name in names
        for split, seeds in SEEDS.items()
        for seed in seeds
    )
    (folder / TASKS).write_text("\n".join(lines) + "\n")


TEXTARENA: Final = Library(NAME, Path(__file__).with_name("requirements.lock"), prepare=write_tasks)

"""Libraries of games, with data sets that are made when they are installed.

Guarantee: a game in a data set has begun on this host, twice and in the same way, without a network.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from rollout_service.environments.bridges.process import library_process, run_while_installing, source_of
from rollout_service.environments.dataset_files import read_instances
from rollout_service.environments.libraries import Library

WORKER: Final = Path(__file__).with_name("worker.py")
LIST_SECONDS: Final = 300.0
SEEDS: Final = {"train": range(1, 17), "held_out": range(1_001, 1_005)}
"""The seeds of each game in a data set, by split."""


@dataclass(frozen=True, slots=True)
class GameLibrary:
    """`tasks` and `names` raise ConfigurationError if the library is not installed."""

    library: Library
    part: Path

    def command(self, python: str, packages: str | None = None) -> list[str]:
        """Run the games; `packages` is for an interpreter that does not have them."""
        options = [python, "-I" if packages is None else "-sP", "-c", source_of(WORKER), source_of(self.part)]
        return options if packages is None else [*options, packages]

    def tasks(self, players: int) -> list[dict[str, JsonValue]]:
        return self.library.instances(_file_name(players))

    def names(self, players: int) -> frozenset[str]:
        return _names(self.library.python().parents[1] / _file_name(players))


def game_library(name: str, folder: Path, players: tuple[int, ...] = (1,)) -> GameLibrary:
    """Return the library of a folder with its lock and its part of the worker."""
    part, lock = folder / "worker.py", folder / "requirements.lock"
    prepare = partial(write_tasks, name, part, players)
    return GameLibrary(Library(name, lock, prepare=prepare, prepared_by=(WORKER, part)), part)


def write_tasks(name: str, part: Path, players: tuple[int, ...], folder: Path) -> None:
    """Call it while the library is installed in a folder."""
    command = [str(folder / "bin" / "python"), "-I", "-c", source_of(WORKER), source_of(part)]

    async def list_games() -> dict[int, list[str]]:
        async with library_process(command, name) as process:
            return {
                count: (await process.ask({"op": "games", "players": count}, LIST_SECONDS))["games"]
                for count in players
            }

    games = run_while_installing(list_games, f"the games of {name} cannot be listed")
    for count, names in games.items():
        (folder / _file_name(count)).write_text("".join(f"{line}\n" for line in _lines(names)))


def _lines(names: list[str]) -> list[str]:
    return [
        json.dumps({"game": name, "seed": seed, "split": split})
        for name in names
        for split, seeds in SEEDS.items()
        for seed in seeds
    ]


def _file_name(players: int) -> str:
    return f"players-{players}.jsonl"


@cache
def _names(path: Path) -> frozenset[str]:
    return frozenset(str(task["game"]) for task in read_instances(path))

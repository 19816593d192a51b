"""A game of one's own: a folder with an `environment.toml` of `kind = "game"`, and the program that it names.

Guarantees: the program runs in the agent's sandbox, and gets nothing but the policy's texts; rewards are those that it
replies. A program that ends, hangs or sends no usable reply fails the rollout, and is never a zero.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, JsonValue

from api_schemas.base import Name
from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.base.templates import PromptTemplate
from rollout_service.environments.bridges.games.environment import SYSTEM, GamePartner
from rollout_service.environments.bridges.process import library_in_sandbox
from rollout_service.environments.bridges.turns import score_turns, take_actions, take_turns
from rollout_service.environments.contract import (
    Environment,
    EnvironmentSettings,
    SandboxSettings,
)
from rollout_service.environments.dataset_files import ShippedTasks
from rollout_service.environments.declarative.declaration import (
    AuditSolution,
    DatasetTable,
    dataset_files,
    load_table,
    resolve_image,
    spec_from,
)
from rollout_service.environments.declarative.environment import (
    NAMED,
    SecretFolder,
    below,
    instance_file,
    require_success,
)
from rollout_service.environments.declarative.files import read_folder
from rollout_service.episodes import Episode, EpisodeLimits, Score

KIND: Final = "game"


class GameDeclaration(EnvironmentSettings):
    kind: Literal["game"] = "game"
    name: Name
    description: str = ""
    image: str = Field("base", min_length=1)
    command: str = Field(min_length=1)
    """The game, which replies to lines of JSON."""
    system: str = SYSTEM
    limits: EpisodeLimits = EpisodeLimits()
    sandbox: SandboxSettings = SandboxSettings()
    solution: AuditSolution | None = None
    """For audits alone: each line that it prints is an action."""
    dataset: DatasetTable | None = None


class DeclaredGame(Environment):
    def __init__(self, declaration: GameDeclaration, folder: Path) -> None:
        files = dataset_files(declaration.dataset, folder)
        self._declaration = declaration
        self.shipped = ShippedTasks.read(files)
        self._files = read_folder(folder, without=[path for path, _ in files])
        self._system = PromptTemplate(declaration.system, where=f"the system prompt of {declaration.name!r}")
        self.has_solution = declaration.solution is not None
        self.spec = spec_from(declaration, image=resolve_image(declaration.image, folder), prompt="")

    def check(self, instance: dict[str, JsonValue]) -> None:
        self._system.render(instance)

    async def run(self, episode: Episode) -> StopReason:
        async with self._begun(episode) as (partner, text):
            system = self._system.render(episode.instance)
            messages = [Message(role="system", content=system), Message(role="user", content=text)]
            return await take_turns(episode, messages, partner)

    async def solve(self, episode: Episode) -> StopReason:
        if (solution := self._declaration.solution) is None:
            return await super().solve(episode)
        place = await self._place(episode)
        seconds = episode.limits.agent_seconds
        result = await place.run(solution.command, cwd=place.path, seconds=seconds)
        require_success("solution", solution.command, result)
        await place.remove()
        async with self._begun(episode) as (partner, _):
            actions = result.stdout.decode(errors="replace").splitlines()
            return await take_actions(episode, actions, partner)

    async def evaluate(self, episode: Episode) -> Score:
        return score_turns(episode)

    def findings(self) -> list[str]:
        solution = self._declaration.solution
        commands = {"command": self._declaration.command, "[solution]": solution.command if solution else ""}
        there = {file.path for file in self._files}
        missing = [
            f"{key}: there is no file {name}"
            for key, command in commands.items()
            for name in NAMED.findall(command)
            if name not in there
        ]
        return [*missing, *super().findings()]

    @asynccontextmanager
    async def _begun(self, episode: Episode) -> AsyncIterator[tuple[GamePartner, str]]:
        place, name = await self._place(episode), f"the game {self.spec.name!r}"
        command, env = place.command(self._declaration.command), {**place.env(), "PYTHONUNBUFFERED": "1"}
        async with library_in_sandbox(place.sandbox, command, name, env=env) as process:
            partner = GamePartner(process)
            yield partner, await partner.begin({"instance": episode.instance})

    async def _place(self, episode: Episode) -> SecretFolder:
        files = [instance_file(episode.instance), *below(self._files)]
        return await SecretFolder.make(episode.require_sandbox(), files)


def load_game(folder: Path) -> DeclaredGame:
    return DeclaredGame(load_table(GameDeclaration, folder), folder)

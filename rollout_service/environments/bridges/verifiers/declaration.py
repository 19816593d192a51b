"""The keys of an `environment.toml` with `kind = "verifiers"`: tasksets of verifiers, and where their packages are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, field_validator

from api_schemas.base import Name
from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.contract import EnvironmentSettings, SandboxSettings
from rollout_service.environments.declarative.declaration import FILE_NAME, load_table
from rollout_service.episodes import EpisodeLimits

KIND: Final = "verifiers"


class TasksetTable(EnvironmentSettings):
    """`[[taskset]]`: one taskset with its configuration."""

    id: str = Field(min_length=1)
    """The name of its package or module, as the library takes it."""
    name: str = ""
    """The name by which instances call it; by default its `id`."""
    config: dict[str, Any] = {}
    """The keys of its configuration, which its package defines."""
    split: str | None = Field(None, min_length=1)
    """The split that its tasks belong to, such as `train`."""
    limit: int = Field(10_000, ge=1)
    """How many of its tasks are used, from the first on. They are kept in memory."""

    @property
    def called(self) -> str:
        return self.name or self.id


class VerifiersDeclaration(EnvironmentSettings):
    kind: Literal["verifiers"] = "verifiers"
    name: Name = KIND
    description: str = "Tasks of verifiers, scored by their own rewards."
    image: str = Field("base", min_length=1)
    """The image of the sandbox; it needs a python3 of the same minor version as the service's."""
    packages: list[str] = ["."]
    """Folders with the packages of tasksets, relative to that of the file."""
    requirements: list[str] = []
    """Requirements of these packages besides the library, in pip's form."""
    taskset: list[TasksetTable] = Field(min_length=1)
    limits: EpisodeLimits = EpisodeLimits()
    sandbox: SandboxSettings = SandboxSettings(memory="2G", max_processes=64)

    @field_validator("taskset")
    @classmethod
    def _names_are_unique(cls, tables: list[TasksetTable]) -> list[TasksetTable]:
        names = [one.called for one in tables]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tables [[taskset]] are named {twice[0]!r}; give one a `name` of its own")
        return tables

    @field_validator("requirements")
    @classmethod
    def _have_no_options(cls, requirements: list[str]) -> list[str]:
        if options := [one for one in requirements if not one or one.startswith("-")]:
            raise ValueError(f'{options[0]!r} is not a requirement, such as "nltk==3.9.1"')
        return requirements


def read_declaration(folder: Path) -> VerifiersDeclaration:
    path = folder / FILE_NAME
    declaration = load_table(VerifiersDeclaration, folder)
    for name in declaration.packages:
        if not (folder / name).is_dir():
            raise ConfigurationError(
                f"{path}: there is no folder {folder / name}",
                hint="`packages` names folders that hold the packages of tasksets.",
            )
    return declaration

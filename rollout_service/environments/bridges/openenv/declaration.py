"""The keys of an `environment.toml` with `kind = "openenv"`.

Guarantee: the address is the operator's. Nothing in a task's instance can lead to another one.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from api_schemas.base import Name
from rollout_service.environments.contract import EnvironmentSettings, EnvironmentSpec
from rollout_service.environments.declarative.declaration import DatasetTable
from rollout_service.episodes import EpisodeLimits


class OpenEnvDeclaration(EnvironmentSettings):
    """The whole file."""

    kind: Literal["openenv"] = "openenv"
    name: Name
    description: str = "An environment that a server of OpenEnv runs."
    url: str = Field(pattern=r"^https?://[^/@?#\s]+(/[^?#\s]*)?$")
    """The server's address, to which `/ws` and `/schema` are added."""
    headers: dict[str, str] = {}
    """Headers of every request, such as a token's."""
    sessions: int = Field(1, ge=1)
    """How many rollouts have a session at once; others wait. Servers allow one unless they are started with more."""
    text_field: str | None = Field(None, min_length=1)
    """The field of an action that the policy's whole text fills; left out, the policy acts by calls of `tool`."""
    tool: str = Field("act", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """The name of the tool whose arguments are an action."""
    observation_field: str | None = Field(None, min_length=1)
    """The field of an observation that the policy sees; left out, all of it."""
    system: str | None = None
    prompt: str = ""
    """Stands before the first observation."""
    replayable: Literal["tools", "never"] = "never"
    """`tools`: the same reset and actions always bring the same observations, so an interrupted rollout can resume."""
    limits: EpisodeLimits = EpisodeLimits(max_turns=64, max_tokens=32_768, max_turn_tokens=2_048)
    dataset: DatasetTable | None = None

    @field_validator("tool")
    @classmethod
    def _is_the_only_way_to_act(cls, tool: str, info: ValidationInfo) -> str:
        if info.data.get("text_field") is not None:
            raise ValueError("give either `text_field` or `tool`")
        return tool

    def spec(self) -> EnvironmentSpec:
        """Return the environment's description, which has neither the address nor the headers."""
        return EnvironmentSpec(
            name=self.name,
            description=self.description,
            system=self.system,
            prompt=self.prompt,
            limits=self.limits,
        )

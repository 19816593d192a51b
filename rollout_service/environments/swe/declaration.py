"""The keys of an `environment.toml` with `kind = "swe"`: a set of tasks of SWE-bench's family."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from api_schemas.base import Name
from rollout_service.environments.contract import (
    EnvironmentSettings,
    EnvironmentSpec,
    EvaluateIn,
    SandboxSettings,
)
from rollout_service.environments.declarative.declaration import DatasetTable
from rollout_service.environments.swe.tasks import SweFamily
from rollout_service.episodes import EpisodeLimits

KIND = "swe"

SYSTEM = (
    "You repair software. Use your tools to look at the repository, change it, and try out what you changed."
)
PROMPT = """\
The repository in {{ instance.repo_folder | default("/testbed") }} has this problem:

{{ instance.problem_statement }}

Change the repository's source so that the problem is solved. Tests that you cannot see check your work; changes of
tests and of their configuration are not taken over. There is no network. Call finish when you are done.
"""


class SweDeclaration(EnvironmentSettings):
    """The whole file."""

    kind: Literal["swe"] = "swe"
    name: Name = KIND
    description: str = "Software repairs in the form of SWE-bench, scored by hidden tests."
    family: SweFamily | None = None
    """The set that the instances are from; by default, it is told from the fields of each."""
    image: str | None = Field(None, min_length=1)
    """The image of a task, a template such as `swe-{{ instance.instance_id }}`; by default, the instance names it."""
    system: str | None = SYSTEM
    prompt: str = PROMPT
    tools: list[str] = ["bash", "python", "str_replace_editor", "finish"]
    limits: EpisodeLimits = EpisodeLimits(
        max_turns=100,
        max_tokens=131_072,
        init_seconds=600.0,
        agent_seconds=2_700.0,
        rollout_seconds=3_600.0,
        evaluate_seconds=1_800.0,
    )
    sandbox: SandboxSettings = SandboxSettings(memory="8G", disk="16G", max_processes=1_024)
    dataset: DatasetTable | None = None
    """Files with one instance per line. They are kept in memory: give large ones to a run as a file."""

    def spec(self) -> EnvironmentSpec:
        """Return the description that all tasks share; each task has its own image."""
        return EnvironmentSpec(
            name=self.name,
            description=self.description,
            system=self.system,
            prompt=self.prompt,
            tools=self.tools,
            limits=self.limits,
            sandbox=self.sandbox,
            evaluate_in=EvaluateIn.FRESH,
        )

"""The keys of `environment.toml`, and how the file is read.

Guarantees: an unknown key is rejected with its path and the nearest known key; a declaration agrees with its folder.
One that is not valid raises ConfigurationError, with a line for every key at fault.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from api_schemas.base import Name
from rollout_service.agents.harnesses.preset import HarnessSettings
from rollout_service.agents.harnesses.registry import harnesses
from rollout_service.agents.mcp.settings import McpSettings
from rollout_service.agents.parallel.settings import ParallelSettings
from rollout_service.agents.web.search import SearchSettings
from rollout_service.base.errors import ConfigurationError, did_you_mean
from rollout_service.base.validation import known_fields
from rollout_service.environments.contract import (
    AgentProcesses,
    EnvironmentSettings,
    EnvironmentSpec,
    EvaluateIn,
    SandboxSettings,
    Secrets,
    Size,
)
from rollout_service.episodes import EpisodeLimits

M = TypeVar("M", bound=BaseModel)

FILE_NAME = "environment.toml"
NO_GPU = "sandboxes have no GPU. Let a service do what needs one, and list its host in `network` of [sandbox]"
TEXT_HINT = "Put the file there, saved as text in UTF-8."
TOML_HINT = "Correct that line: texts and dates need quotes at both ends, lists and tables their closing brackets."
VALUES_HINT = "docs/reference/environment-toml.md says what each key takes."
EVALUATE_HINT = 'Add a line [evaluate] and below it: command = "python3 /environment/grade.py".'
INSIDE = "/environment"
"""Commands find the environment's folder here."""


class InitTable(EnvironmentSettings):
    """`[init]`: the command that prepares the sandbox."""

    command: str = Field(min_length=1)
    files: list[str] = []
    """Files and folders of the environment that the command needs, in addition to those that it names itself."""
    secrets: Secrets = {}
    """Variables of this command alone, with values that are shown nowhere; processes that it leaves running are
    ended."""
    shared: bool = False
    """Whether the command leaves only files, the same for all rollouts of an instance: a node then runs it for one of
    them, and the others start from a copy of its files. Processes that it leaves running are ended."""
    each: str | None = Field(None, min_length=1)
    """A command that runs in every rollout after the shared one."""

    @model_validator(mode="after")
    def _each_comes_after_a_shared_command(self) -> Self:
        if self.each is not None and not self.shared:
            raise ValueError("`each` needs `shared = true`: without it, `command` runs in every rollout")
        return self


class AuditSolution(EnvironmentSettings):
    """`[solution]`: the command that solves the task, for audits alone; its output is the agent's answer."""

    command: str = Field(min_length=1)


class RunTable(EnvironmentSettings):
    """`[evaluate.run]`: how the agent's program is run before the grader, the instance and the result are there."""

    command: str = Field(min_length=1)
    stdin: str | None = None
    """The instance's field with the program's input: a string, or a list of strings, one per run."""
    seconds: float = Field(10.0, gt=0)
    """The time limit of each run; all runs together get half of the evaluation's time."""
    output_size: Size = "64K"
    """The amount of standard output, and of standard error, that is kept of each run."""


class EvaluateTable(EnvironmentSettings):
    """`[evaluate]`: the command that scores the outcome."""

    command: str = Field(min_length=1)
    run: RunTable | None = None
    sandbox: Literal[EvaluateIn.FRESH, EvaluateIn.SAME] = EvaluateIn.FRESH
    agent_processes: AgentProcesses = "end"
    """Whether processes that outlive the agent are ended before the command runs, or kept. Kept ones can forge the
    reward."""
    artifacts: list[str] = ["/workspace"]
    """Absolute paths that are copied from the agent's sandbox into a fresh one."""
    artifacts_size: Size = "256M"
    """The limit for all artifacts together; an agent that leaves more counts as having left nothing."""
    secrets: Secrets = {}
    """Variables of this command alone, with values that are shown nowhere."""

    @model_validator(mode="after")
    def _secrets_are_kept_from_the_agent(self) -> Self:
        if self.secrets and self.sandbox is EvaluateIn.SAME:
            raise ValueError(
                '`secrets` need sandbox = "fresh": programs that the agent left could read them. Name what the agent '
                "changes in `artifacts`; the command can start a server of its own from it"
            )
        return self

    @model_validator(mode="after")
    def _kept_processes_are_in_the_sandbox(self) -> Self:
        if self.agent_processes == "keep" and (self.sandbox is not EvaluateIn.SAME or self.run is not None):
            raise ValueError(
                'agent_processes = "keep" needs sandbox = "same" and no [evaluate.run]: a fresh sandbox has no '
                "process of the agent, and all are ended after its program was run"
            )
        return self


class DatasetTable(EnvironmentSettings):
    """`[dataset]`: the instances that ship with the environment."""

    path: str | None = Field(None, min_length=1)
    """A file with one instance, a JSON object, per line; an instance belongs to the split named in its `split`."""
    splits: dict[Name, str] = {}
    """Instead of `path`, one file per split, such as `train = "train.jsonl"`; instances get its name as `split`."""

    @model_validator(mode="after")
    def _is_one_or_several_files(self) -> Self:
        if (self.path is None) is not bool(self.splits):
            raise ValueError("give either `path` or `splits`")
        return self

    def files(self, folder: Path) -> list[tuple[Path, str | None]]:
        if self.path is not None:
            return [(folder / self.path, None)]
        return [(folder / path, name) for name, path in self.splits.items()]


def dataset_files(table: DatasetTable | None, folder: Path) -> list[tuple[Path, str | None]]:
    return [] if table is None else table.files(folder)


class Declaration(EnvironmentSettings):
    name: Name
    description: str = ""
    image: str = Field(min_length=1)
    """May be left out if the harness names one."""
    system: str | None = None
    prompt: str = "{{ instance.question }}"
    tools: list[str] = ["bash", "python", "read", "write", "edit", "finish"]
    harness: HarnessSettings | None = None
    """The program that is the agent instead of the built-in one: its name, or `[harness]` with more."""
    mcp: list[McpSettings] = []
    """`[[mcp]]`: servers of the Model Context Protocol, whose tools the agent has too."""
    search: SearchSettings | None = None
    """`[search]`: the service behind the tool `search`."""
    parallel: ParallelSettings | None = None
    """`[parallel]`: how the agent may hand on work to sub-agents."""
    replayable: Literal["tools", "never"] = "tools"
    """Whether `init` and the recorded tool calls recreate the sandbox: `never` if something outside it matters."""
    limits: EpisodeLimits = EpisodeLimits()
    sandbox: SandboxSettings = SandboxSettings()
    init: InitTable | None = None
    evaluate: EvaluateTable
    solution: AuditSolution | None = None
    dataset: DatasetTable | None = None

    @field_validator("harness", mode="before")
    @classmethod
    def _harness_may_be_a_name(cls, harness: Any) -> Any:
        return {"name": harness} if isinstance(harness, str) else harness

    @model_validator(mode="before")
    @classmethod
    def _harness_may_have_an_image(cls, table: Any) -> Any:
        if not isinstance(table, dict) or "image" in table:
            return table
        harness = table.get("harness")
        name = harness.get("name") if isinstance(harness, dict) else harness
        image = next((one.image for one in harnesses() if one.name == name), None) if name else None
        return table if image is None else {**table, "image": image}

    def spec(self, folder: Path) -> EnvironmentSpec:
        """Make an image that is a file in the folder an absolute path."""
        fresh = self.evaluate.sandbox is EvaluateIn.FRESH
        return spec_from(
            self,
            image=resolve_image(self.image, folder),
            tools=[] if self.harness is not None and "tools" not in self.model_fields_set else self.tools,
            evaluate_in=self.evaluate.sandbox,
            artifacts=self.evaluate.artifacts if fresh else [],
            artifacts_size=self.evaluate.artifacts_size,
            agent_processes=self.evaluate.agent_processes,
            init_secrets=self.init.secrets if self.init is not None else {},
            evaluate_secrets=self.evaluate.secrets,
            runs_submission=self.evaluate.run is not None,
        )


def spec_from(declaration: EnvironmentSettings, **own: Any) -> EnvironmentSpec:
    """Use a declaration's keys of the same names, and `own`."""
    shared = {key: value for key, value in declaration if key in EnvironmentSpec.model_fields}
    return EnvironmentSpec(**{**shared, **own})


def load_table(model: type[M], folder: Path) -> M:
    path = folder / FILE_NAME
    return read_table(model, parse_toml(read_text(path), where=str(path)), where=str(path))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", hint=TEXT_HINT) from error


def read_declaration(text: str, *, where: str, image: str | None = None) -> Declaration:
    """`image` is the image that the file was found in, and replaces the key."""
    table = parse_toml(text, where=where) | ({} if image is None else {"image": image})
    return read_table(Declaration, table, where=where)


def parse_toml(text: str, *, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for a long number, and for many brackets
        raise ConfigurationError(f"{where} is not valid TOML: {error}", hint=TOML_HINT) from error


def read_table(model: type[M], table: dict[str, Any], *, where: str) -> M:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        items = error.errors(include_url=False)
        lines = [f"{where}: {_explain(model, item)}" for item in items]
        raise ConfigurationError("\n".join(lines), hint=_keys_there_are(model, items) or VALUES_HINT) from error


def _explain(model: type[BaseModel], item: Any) -> str:
    if not item["loc"]:  # keys that contradict each other
        return str(item["msg"]).removeprefix("Value error, ")
    *parents, last = [str(part) for part in item["loc"]]
    path = ".".join([*parents, last])
    if item["type"] == "extra_forbidden" and last.startswith("gpu"):
        return f"there is no key {path}: {NO_GPU}"
    if item["type"] == "extra_forbidden":
        return f"there is no key {path}{did_you_mean(last, known_fields(model, parents))}"
    if item["type"] == "missing":
        return f"the key {path} is missing"
    return f"{path}: {str(item['msg']).removeprefix('Value error, ')}"


def _keys_there_are(model: type[BaseModel], items: Sequence[Any]) -> str:
    """Name the keys of tables with an unknown or a missing one; empty if only values are wrong."""
    if [(item["type"], item["loc"]) for item in items] == [("missing", ("evaluate",))]:
        return EVALUATE_HINT
    places = [item["loc"][:-1] for item in items if item["type"] in ("extra_forbidden", "missing")]
    tables = dict.fromkeys(tuple(map(str, place)) for place in places)
    return " ".join(f"{_name_of(table)} takes {', '.join(sorted(known_fields(model, [*table])))}." for table in tables)


def _name_of(table: tuple[str, ...]) -> str:
    if not table:
        return "The file"
    if table[-1].isdigit():
        return f"[[{'.'.join(part for part in table if not part.isdigit())}]]"
    return f"[{'.'.join(table)}]"


def resolve_image(image: str, folder: Path) -> str:
    """Make an image that is a file in the environment's folder an absolute path."""
    path = folder / image
    if path.exists():
        return str(path.resolve())
    if image.endswith(".sif") or image.startswith(("/", "./", "../")):
        raise ConfigurationError(
            f"{folder / FILE_NAME}: there is no image {path}",
            hint="Build it with `rollout-service image build`, or name another image in `image`.",
        )
    return image

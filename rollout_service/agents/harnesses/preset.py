"""How a program is started as an agent: its command, variables and files, as data.

A value of a task or a rollout reaches the program as one argument, variable or file, never through a shell; an unknown
placeholder is refused when the preset is read.
"""

from __future__ import annotations

from string import Template
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from api_schemas.base import Name

PLACEHOLDERS = frozenset({"prompt", "url", "key", "model", "workdir"})
"""The names of the placeholders (`$name`) of commands, variables and files. `url` is the gateway's, without a path."""
Text = Annotated[str, Field(max_length=256 * 1024)]


class HarnessModel(BaseModel):
    """A part of a harness; unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class InstallTable(HarnessModel):
    """`[install]`: the additions of its image to the base image."""

    npm: list[str] = []
    """Packages of the npm registry, with their versions."""
    scripts: list[str] = []
    """Those of `npm` whose install scripts are needed; others run none."""
    pip: list[str] = []
    """Python packages, with their versions."""
    sources: list[str] = []
    """Those of `pip`, or of what they require, that have no wheel: their own scripts build one on the host."""
    debian: list[str] = []
    suite: str | None = None
    """The Debian release whose Python they need; by default that of the base image."""


class CheckTable(HarnessModel):
    """`[check]`: a call with which a scripted model makes the program run a shell command."""

    tool: str
    arguments: dict[str, JsonValue]
    """The call's arguments; `COMMAND` in a text stands for the command."""
    end: str | None = None
    """The command that ends the program, if a plain answer does not."""


ServerForm = Literal["claude", "codex", "gemini", "opencode"]
"""How settings of a program name MCP servers."""


class ServersTable(HarnessModel):
    """`[mcp]`: the form in which the program's settings name MCP servers."""

    form: ServerForm
    file: str
    """The file of its settings, one of `files` or another."""
    arguments: list[str] = []
    """Arguments to insert after the program's name if there are MCP servers."""


class HarnessProgram(HarnessModel):
    """The settings of `[harness]` in an `environment.toml`; a preset has their defaults."""

    command: list[Text] = []
    """The program and its arguments, with placeholders such as `$prompt`."""
    stdin: Text | None = None
    """The text of its standard input."""
    env: dict[str, Text] = {}
    files: dict[str, Text] = {}
    """Files to write before it starts, by their paths: absolute, or below `~/`."""

    @model_validator(mode="after")
    def _placeholders_exist(self) -> Self:
        texts = [*self.command, *self.env.values(), *self.files.values(), self.stdin or ""]
        for text in texts:
            if not (template := Template(text)).is_valid():
                raise ValueError(f"has a $ that begins no placeholder; write $$ for a dollar sign: {text[:80]!r}")
            if unknown := set(template.get_identifiers()) - PLACEHOLDERS:
                names = ", ".join(f"${name}" for name in sorted(PLACEHOLDERS))
                raise ValueError(f"there is no ${min(unknown)}; the placeholders are {names}, and $$ is a dollar sign")
        for path in self.files:
            if not path.startswith(("/", "~/")) or ".." in path.split("/"):
                raise ValueError(f"the file {path!r} is neither absolute nor below ~/")
        return self


class HarnessPreset(HarnessProgram):
    """A known program."""

    name: Name
    title: str
    version: str = ""
    """The version that this preset was made for, and that its image has; empty if the program is the user's own."""
    version_command: list[str] = []
    """A command that prints the version."""
    dialect: str = ""
    """The API that it speaks to the gateway."""
    image: Name | None = None
    """The image that has it, by the name under which `rollout-service image build` makes it."""
    install: InstallTable | None = None
    check: CheckTable | None = None
    mcp: ServersTable | None = None
    known_limits: list[str] = []
    """Sentences for people on features that do not work, or work otherwise than one expects."""


class HarnessSettings(HarnessProgram):
    """`[harness]` of an `environment.toml`: which program is the agent, and the changes to its preset."""

    name: Name
    """A preset (`rollout-service harness list`), or `command` for any program."""
    version: str | None = None
    """The version that the image must have; by default any."""
    model: str = Field("policy", pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")
    """The name by which the program asks for the model."""

    def applied_to(self, preset: HarnessPreset) -> HarnessPreset:
        """Return the preset with these settings: a command replaces its own, variables and files are added."""
        update = {
            "env": {**preset.env, **self.env},
            "files": {**preset.files, **self.files},
            **({"command": self.command} if self.command else {}),
            **({"stdin": self.stdin} if self.stdin is not None else {}),
        }
        return preset.model_copy(update=update)

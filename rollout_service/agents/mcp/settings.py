"""`[[mcp]]`: the servers of an environment."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class McpSettings(BaseModel):
    """One server: a program inside the agent's sandbox, or an address that the sandbox may reach."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")
    """The prefix of its tools' names: the tool `add` of the server `notes` is `notes__add`."""
    command: list[str] = []
    """The program and its arguments, each a separate string; it speaks over its standard input and output."""
    env: dict[str, str] = {}
    """More environment variables of the program."""
    url: str | None = Field(None, pattern=r"^https?://[^/\s]+")
    """Instead of a command: the address of a server with the Streamable HTTP transport."""
    headers: dict[str, str] = {}
    """Headers of every request to the address."""
    tools: list[str] | None = None
    """The names of the tools to offer, as the server has them; left out, all of them."""
    start_seconds: float = Field(30.0, gt=0)
    """How long it may take to start and to list its tools."""
    call_seconds: float | None = Field(None, gt=0)
    """How long one call may take; left out, and at most, `limits.tool_seconds`."""

    @field_validator("command", mode="before")
    @classmethod
    def _command_is_a_list(cls, command: object) -> object:
        if isinstance(command, str):
            raise ValueError('give the program and its arguments as a list, such as ["python3", "server.py"]')  # noqa: TRY004
        return command

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if bool(self.command) is (self.url is not None):
            raise ValueError("give either `command` or `url`")
        if self.command and self.headers:
            raise ValueError("`headers` belong to a `url`, not to a `command`")
        if self.url is not None and self.env:
            raise ValueError("`env` belongs to a `command`, not to a `url`")
        return self

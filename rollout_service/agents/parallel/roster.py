"""The sub-agents that an agent has created, and the calls that create them and assign tasks to them.

Guarantee: a call that cannot be carried out as written raises ToolInputError with what to write instead.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from api_schemas.trajectories import ToolCall
from rollout_service.agents.errors import ToolInputError
from rollout_service.agents.parallel.tools import ASSIGN, CREATE, MAX_CHARS, MAX_NAME_CHARS, created_text
from rollout_service.agents.tool_calling.tools import Arguments, explain


class Creation(Arguments):
    """The arguments of `create_subagent`."""

    name: str
    system_prompt: str


class Assignment(Arguments):
    """The arguments of `assign_task`."""

    agent: str
    prompt: str


A = TypeVar("A", Creation, Assignment)


class Roster:
    """The sub-agents of one agent, by name."""

    def __init__(self, max_agents: int) -> None:
        self._prompts: dict[str, str] = {}
        self._max_agents = max_agents

    def __len__(self) -> int:
        return len(self._prompts)

    def create(self, call: ToolCall) -> str:
        """Carry out a call that creates a sub-agent; return the text for the policy. To repeat a call is no mistake.

        Raises:
            ToolInputError: It cannot be created.
        """
        wanted = _read(call, Creation, CREATE)
        _check(CREATE, "name", wanted.name, MAX_NAME_CHARS)
        _check(CREATE, "system_prompt", wanted.system_prompt, MAX_CHARS)
        known = self._prompts.get(wanted.name)
        if known is not None and known != wanted.system_prompt:
            raise ToolInputError(
                f"there is a sub-agent {wanted.name!r} with another system prompt; take another name"
            )
        if known is None and len(self._prompts) >= self._max_agents:
            raise ToolInputError(f"there are {self._max_agents} sub-agents, and no more can be created")
        self._prompts[wanted.name] = wanted.system_prompt
        return created_text(wanted.name)

    def assignment(self, call: ToolCall) -> tuple[Assignment, str]:
        """Return what a call assigns, and the system prompt of its sub-agent.

        Raises:
            ToolInputError: There is no such sub-agent, or a field is empty or too long.
        """
        wanted = _read(call, Assignment, ASSIGN)
        if wanted.agent not in self._prompts:
            names = ", ".join(self._prompts) or "none; create one first"
            raise ToolInputError(
                f"there is no sub-agent {wanted.agent[:MAX_NAME_CHARS]!r}. Sub-agents: {names}"
            )
        _check(ASSIGN, "prompt", wanted.prompt, MAX_CHARS)
        return wanted, self._prompts[wanted.agent]


def _read(call: ToolCall, model: type[A], tool: str) -> A:
    try:
        return model.model_validate(call.arguments)
    except ValidationError as error:
        raise ToolInputError(f"wrong arguments for {tool}: {explain(error)}") from error


def _check(tool: str, field: str, text: str, longest: int) -> None:
    if not text.strip():
        raise ToolInputError(f"wrong arguments for {tool}: {field} is empty")
    if len(text) > longest:
        raise ToolInputError(
            f"wrong arguments for {tool}: {field} has {len(text)} characters, over {longest}; shorten it"
        )

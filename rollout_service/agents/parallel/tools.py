"""The two tools of an agent with sub-agents, as the policy sees them: `create_subagent` and `assign_task`.

Their names, their arguments and their texts are fixed, since policies are trained on them.
"""

from __future__ import annotations

import re
from typing import Any

from api_schemas.rollouts.trees import InvalidBecause
from rollout_service.tokens import ToolSpec, tool_spec

CREATE = "create_subagent"
ASSIGN = "assign_task"
MAX_CHARS = 8_192
"""The longest system prompt, and the longest assignment."""
MAX_NAME_CHARS = 64

_END = "</result>"
_RESULT = re.compile(rf"<result>(.*?){_END}", re.DOTALL)
RESULT_RULE = "Put your result in <result></result>."
"""Added to every sub-agent's system prompt, after an empty line."""


def _tool(tool: str, description: str, *fields: str) -> ToolSpec:
    properties: dict[str, Any] = {field: {"type": "string"} for field in fields}
    parameters = {"type": "object", "properties": properties, "required": list(fields)}
    return tool_spec(tool, description, parameters)


CREATE_SPEC = _tool(CREATE, "Create a sub-agent, to which tasks can be assigned by its name.", "name", "system_prompt")
ASSIGN_SPEC = _tool(
    ASSIGN,
    "Assign a task to a sub-agent and get its result. Tasks assigned in one turn are done at the same time.",
    "agent",
    "prompt",
)


def marked_result(text: str) -> str | None:
    # No search for an end begins after the last one, or a policy could make many of them.
    blocks = _RESULT.findall(text, 0, text.rfind(_END) + len(_END))
    return blocks[-1].strip() if blocks else None


def created_text(name: str) -> str:
    return f"created {name}"


def result_text(result: str, invalid_because: InvalidBecause | None) -> str:
    """Add a line that says why the result is not valid."""
    if invalid_because is None:
        return result
    note = f"[{_WHY[invalid_because]}]"
    return f"{result}\n{note}" if result else note


_WHY = {
    InvalidBecause.EMPTY: "the sub-agent gave no result",
    InvalidBecause.NO_RESULT: "the sub-agent did not mark its result",
    InvalidBecause.NO_TOOL_CALL: "the sub-agent called no tool",
    InvalidBecause.TRUNCATED: "the sub-agent was cut off",
    InvalidBecause.MALFORMED: "the sub-agent's calls were malformed",
    InvalidBecause.MAX_TURNS: "the sub-agent used up its turns",
    InvalidBecause.MAX_TOKENS: "the sub-agent used up its tokens",
    InvalidBecause.MAX_TOOL_CALLS: "the sub-agent used up its tool calls",
    InvalidBecause.CONTEXT_FULL: "the sub-agent's context was full",
    InvalidBecause.TIMEOUT: "the sub-agent ran out of time",
    InvalidBecause.MAX_CRITICAL_STEPS: "the steps for this task are used up",
    InvalidBecause.SANDBOX_ENDED: "the sub-agent ended its sandbox",
    InvalidBecause.CANCELLED: "the sub-agent was stopped",
    InvalidBecause.ERROR: "the sub-agent failed",
}

"""The prompts of an orchestrator and of its sub-agents, exactly as the environments show them."""

from __future__ import annotations

from typing import Final

from rollout_service.agents.parallel.tools import RESULT_RULE
from rollout_service.environments.builtin.lookups import READ
from rollout_service.environments.builtin.pointers import environment as pointers
from rollout_service.environments.builtin.split import environment as split
from training.examples import Setup
from training.parl import scripts

POINTERS: Final[Setup] = (None, pointers.tool_definitions())
SPLIT: Final[Setup] = (None, split.tool_definitions())


def subagent(system: str) -> Setup:
    """Return the prompt of a sub-agent that was created with this system prompt."""
    return f"{system}\n\n{RESULT_RULE}", [READ.definition]


SUB_FOLLOW: Final = subagent(scripts.FOLLOW)
SUB_READ: Final = subagent(scripts.READ)

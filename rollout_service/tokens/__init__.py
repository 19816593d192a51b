"""The only package that turns messages into token ids, and sampled ids into messages."""

from rollout_service.tokens.conversation import AssistantTurn, Conversation
from rollout_service.tokens.renderer import ChatRenderer, ParsedTurn, ToolSpec, tool_spec
from rollout_service.tokens.trajectory import check_invariants
from rollout_service.tokens.turn_tree import TreePrompt, TreeTurn, TurnTree

__all__ = [
    "AssistantTurn",
    "ChatRenderer",
    "Conversation",
    "ParsedTurn",
    "ToolSpec",
    "TreePrompt",
    "TreeTurn",
    "TurnTree",
    "check_invariants",
    "tool_spec",
]

"""The only package that turns messages into token ids, and sampled ids into messages."""

from rollout_service.tokens.conversation import AssistantTurn, Conversation
from rollout_service.tokens.renderer import ChatRenderer, ParsedTurn, ToolSpec
from rollout_service.tokens.trajectory import check_invariants

__all__ = ["AssistantTurn", "ChatRenderer", "Conversation", "ParsedTurn", "ToolSpec", "check_invariants"]

"""Which conversation of which client a call belongs to, by the headers that clients send for themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from rollout_service.gateway.contract import Lane
from rollout_service.gateway.dialects.fields import parse_object

_CLIENTS = (
    ("codex", "codex"),
    ("claude-cli", "claude_code"),
    ("qwencode", "qwen_code"),
    ("geminicli", "gemini_cli"),
    ("opencode", "opencode"),
    ("agents/python", "openai_agents"),
)
"""Beginnings of user agents in lower case, and the names of the clients that send them."""
_OPENHANDS = "openhands"
KNOWN_CLIENTS = frozenset({_OPENHANDS, *(name for _, name in _CLIENTS)})
_MAX_ID = 128


def client_name(headers: Mapping[str, str]) -> str:
    """Return the name of the program that sent a request, such as `codex`; empty if it does not say."""
    if headers.get("x-title", "").lower() == _OPENHANDS:
        return _OPENHANDS
    agent = headers.get("user-agent", "").lower()
    for beginning, name in _CLIENTS:
        if agent.startswith(beginning):
            return name
    product = re.split(r"[/ ]", agent.replace("/js", "_js").replace("/python", "_python"), maxsplit=1)[0]
    return re.sub(r"[^a-z0-9]+", "_", product).strip("_")[:32]


def read_lane(headers: Mapping[str, str], session: str = "") -> Lane:
    """Return the lane of a request; `session` is the one in its body, used if its headers have none."""
    client = client_name(headers)
    if client == "codex":
        return _codex(headers)
    if claude := headers.get("x-claude-code-session-id", ""):
        agent = headers.get("x-claude-code-agent-id", "")
        parent = headers.get("x-claude-code-parent-agent-id", "")
        return _lane(client, claude, agent, parent, "subagent" if agent else "")
    if opencode := headers.get("x-session-id", ""):
        parent = headers.get("x-parent-session-id", "")
        return _lane(client, opencode, opencode if parent else "", parent, "subagent" if parent else "")
    known = headers.get("session_id") or headers.get("x-litellm-session-id") or session
    return _lane(client, known, "", "", "")


def _codex(headers: Mapping[str, str]) -> Lane:
    metadata = parse_object(headers.get("x-codex-turn-metadata", "")) or {}
    parent = headers.get("x-codex-parent-thread-id", "")
    is_subagent = bool(parent or headers.get("x-openai-subagent"))
    agent = headers.get("thread-id", "") if is_subagent else ""
    purpose = _codex_purpose(metadata.get("request_kind"), is_subagent)
    return _lane("codex", headers.get("session-id", ""), agent, parent, purpose)


def _codex_purpose(kind: Any, is_subagent: bool) -> Literal["", "side", "compaction", "subagent"]:
    if kind == "compaction":
        return "compaction"
    if kind == "prewarm":
        return "side"
    return "subagent" if is_subagent else ""


def _lane(
    client: str,
    session: str,
    agent: str,
    parent: str,
    purpose: Literal["", "side", "compaction", "subagent"],
) -> Lane:
    return Lane(client, session[:_MAX_ID], agent[:_MAX_ID], parent[:_MAX_ID], purpose)

"""Which of a client's conversations are its agent's own, and which are beside it.

What a client says of a call holds. Of the others, the first conversation with tools is the agent's own, and so is each
that goes on from it or has the same system prompt and tools; one without tools, or that must answer in a schema, is a
side call; one with other tools is an agent that the agent started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import orjson

from api_schemas.trajectories import SegmentRole
from rollout_service.gateway.capture.echoes import Match, RecordedTurn
from rollout_service.gateway.capture.history import Head
from rollout_service.gateway.contract import ClientMessage, ModelCall
from rollout_service.gateway.errors import ContextOverflowError
from rollout_service.tokens import ChatRenderer, TreeTurn

_QUOTED_LINE = 20
"""The shortest line that tells that a text is quoted, in characters."""


def said_role(call: ModelCall) -> SegmentRole | None:
    """Return the role that a client itself tells."""
    lane = call.lane
    if call.kind:
        return SegmentRole.MAIN if call.kind == "main" else SegmentRole.SIDE
    if lane.purpose == "side":
        return SegmentRole.SIDE
    if lane.purpose == "subagent" or lane.agent:
        return SegmentRole.SUBAGENT
    return None


def find_roles(turns: Sequence[RecordedTurn], compacted: frozenset[int]) -> Mapping[int, SegmentRole]:
    """Return the role of each turn by its id; turns in `compacted` wrote the text that replaced the agent's own
    history."""
    main = _main_root(turns)
    roles: dict[int, SegmentRole] = {}
    for each in turns:
        turn, before = each.turn, each.turn.lineage
        said = said_role(each.call)
        if said is not None:
            roles[turn.turn_id] = said
        elif turn.turn_id in compacted or each.call.lane.purpose == "compaction":
            roles[turn.turn_id] = SegmentRole.MAIN if before is None else roles[before.turn_id]
        elif turn.parent is not None:
            # The same head as before it; a client that asks for a schema may still end its conversation so.
            roles[turn.turn_id] = roles[turn.parent.turn_id]
        else:
            inherited = SegmentRole.MAIN if before is None else roles[before.turn_id]
            roles[turn.turn_id] = _role_of_root(each, main, inherited, alone=before is None)
    return roles


class TurnHead(Protocol):
    """The properties of a turn that, with the turns before it, show whose conversation it is in."""

    @property
    def head(self) -> Head:
        """The system prompt and the tools."""

    @property
    def call(self) -> ModelCall:
        """The request."""


def role_of_new(
    turns: Sequence[RecordedTurn],
    compacted: frozenset[int],
    new: TurnHead,
    parent: TreeTurn | None,
    after: TreeTurn | None,
) -> SegmentRole:
    """Return the role of a turn that is not recorded yet, judged by the recorded ones."""
    if (said := said_role(new.call)) is not None:
        return said
    before = parent or after
    if before is None and not turns:
        return SegmentRole.MAIN
    roles = find_roles(turns, compacted)
    inherited = SegmentRole.MAIN if before is None else roles[before.turn_id]
    if parent is not None or new.call.lane.purpose == "compaction":
        return inherited
    return _role_of_root(new, _main_root(turns), inherited, alone=before is None)


def _role_of_root(
    root: TurnHead, main: RecordedTurn | None, inherited: SegmentRole, *, alone: bool
) -> SegmentRole:
    if main is None or root is main or (root.head == main.head and not _has_only_schema(root, main)):
        return inherited
    if _has_only_schema(root, main) or (main.head.tools and not root.head.tools):
        return SegmentRole.SIDE
    if not alone:
        return inherited
    return SegmentRole.SUBAGENT if root.head.tools else SegmentRole.SIDE


def _has_only_schema(root: TurnHead, main: TurnHead) -> bool:
    return root.call.json_schema is not None and main.call.json_schema is None


def _main_root(turns: Sequence[RecordedTurn]) -> RecordedTurn | None:
    """Return the first turn of the agent's own conversation."""
    roots = [each for each in turns if each.turn.lineage is None and said_role(each.call) is None]
    likely = sorted(roots, key=lambda each: (not each.head.tools, each.call.json_schema is not None))
    return next(iter(likely), None)


def quotes(text: str, answer: str) -> bool:
    """Return whether a text has at least half of an answer's lines, leaving out short ones."""
    lines = [line.strip() for line in answer.splitlines() if len(line.strip()) >= _QUOTED_LINE]
    return bool(lines) and sum([line in text for line in lines]) * 2 >= len(lines)


# Compares a prompt with the model's context before it is rendered, which takes 36 bytes for each of its tokens.
#
# A prompt that is not refused here may still be too long: the ids of what is rendered tell exactly.

_SPOKEN_CHARS = 32
"""How many characters an agent's own answers may have for each token of the context. Many chat formats leave out its
reasoning, so these are not counted; no prompt has as many."""


def check_length(
    renderer: ChatRenderer,
    call: ModelCall,
    messages: Sequence[ClientMessage],
    match: Match,
    context_length: int,
) -> None:
    """Refuse a prompt that is surely longer than the context.

    Raises:
        ContextOverflowError: It is; its count of tokens is an estimate.
    """
    known, new = (match.turn.turn.end, messages[match.begin :]) if match.turn is not None else (0, messages)
    room = max(context_length - known, 1)
    texts = [message.text for message in new if message.role != "assistant"]
    if match.turn is None and call.tools:
        texts.append(orjson.dumps([dict(tool) for tool in call.tools]).decode())
    spoken = sum([_spoken_chars(message) for message in new if message.role == "assistant"])
    tokens = renderer.count_if_over(texts, room)
    if tokens is None and spoken > _SPOKEN_CHARS * room:
        tokens = spoken // _SPOKEN_CHARS
    if tokens is not None:
        raise ContextOverflowError(known + tokens, context_length)


def _spoken_chars(message: ClientMessage) -> int:
    calls = sum([len(call.arguments) for call in message.calls])
    return len(message.text) + len(message.reasoning or "") + calls

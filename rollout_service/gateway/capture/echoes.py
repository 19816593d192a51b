"""The recorded turn that a call continues, found by the meaning of the client's messages, and the role of each turn.

A conversation is a path of states. An answer of the policy leads to a state by which turn it is, however its client
writes it; any other message by its content. The cost of a call is one hash for each of its messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import orjson

from api_schemas.trajectories import ForkReason, SegmentRole, ToolCall
from rollout_service.gateway.capture.history import Head, canonical, digest, echo_key, extended, is_object
from rollout_service.gateway.capture.text_stream import SentAnswer, SentCall
from rollout_service.gateway.contract import ClientMessage, ClientToolCall, ModelCall, raw_call_text
from rollout_service.gateway.errors import ContextOverflowError
from rollout_service.tokens import ChatRenderer, TreeTurn

if TYPE_CHECKING:
    from rollout_service.gateway.capture.capture import PlannedTurn


class EchoMatch(StrEnum):
    """The largest change of an answer in a client's history, from none on."""

    EXACT = "exact"
    BY_VALUE = "by_value"
    """The arguments are written in another way, such as with other white space."""
    TEXT_TRIMMED = "text_trimmed"
    REASONING_DROPPED = "reasoning_dropped"
    """The reasoning is left out or changed."""
    ARGUMENTS_REWRITTEN = "arguments_rewritten"
    """A call has another name, other arguments, or is missing."""
    TEXT_CHANGED = "text_changed"


_THOUGHT_BEGINS, _THOUGHT_ENDS = "<think>", "</think>"


def compare(sent: SentAnswer, message: ClientMessage) -> EchoMatch:
    if not _same_text(sent, message):
        message = _untagged(message)
    if not _same_text(sent, message):
        sent = _with_calls_as_text(sent)
    if not _same_text(sent, message):
        return EchoMatch.TEXT_CHANGED
    calls = _compare_calls(sent.calls, message.calls)
    if calls is EchoMatch.ARGUMENTS_REWRITTEN:
        return calls
    if (message.reasoning or "").strip() != sent.reasoning.strip():
        return EchoMatch.REASONING_DROPPED
    return EchoMatch.TEXT_TRIMMED if message.text != sent.text else calls


def _same_text(sent: SentAnswer, message: ClientMessage) -> bool:
    return message.text.strip() == sent.text.strip()


def _with_calls_as_text(sent: SentAnswer) -> SentAnswer:
    """Return an answer as dialects write it that carry no malformed call."""
    calls = [call for call in sent.calls if is_object(call.arguments)]
    told = [raw_call_text(call.name, call.arguments) for call in sent.calls if call not in calls]
    return SentAnswer(sent.reasoning, sent.text + "".join(told), calls)


def _untagged(message: ClientMessage) -> ClientMessage:
    """Return the message with its reasoning apart from the text, into which some clients write it."""
    thought, ended, text = message.text.lstrip().partition(_THOUGHT_ENDS)
    if not (ended and thought.startswith(_THOUGHT_BEGINS)):
        return message
    return message._replace(text=text, reasoning=thought.removeprefix(_THOUGHT_BEGINS))


def same_calls(sent: SentAnswer, message: ClientMessage) -> bool:
    """Compare calls by value and in order; a client may leave out ids."""
    return _compare_calls(sent.calls, message.calls) is not EchoMatch.ARGUMENTS_REWRITTEN


def _compare_calls(sent: Sequence[SentCall], echoed: Sequence[ClientToolCall]) -> EchoMatch:
    if not (sent or echoed):
        return EchoMatch.EXACT
    if [call.name for call in sent] != [call.name for call in echoed]:
        return EchoMatch.ARGUMENTS_REWRITTEN
    if any(other.id not in (None, one.id) for one, other in zip(sent, echoed, strict=True)):
        return EchoMatch.ARGUMENTS_REWRITTEN
    pairs = [(one.arguments, other.arguments) for one, other in zip(sent, echoed, strict=True)]
    if all(one == other for one, other in pairs):
        return EchoMatch.EXACT
    same = all(one == other or canonical(one) == canonical(other) for one, other in pairs)
    return EchoMatch.BY_VALUE if same else EchoMatch.ARGUMENTS_REWRITTEN


@dataclass(slots=True, eq=False, kw_only=True)
class RecordedTurn:
    """A turn, with its parts that the client knows."""

    turn: TreeTurn
    key: str
    head: Head
    state: bytes
    """The state of the conversation that it answers."""
    sent: SentAnswer
    call: ModelCall
    """Without its messages and tools."""
    delivered: bool
    malformed: int
    disagreed: bool
    """The client was sent something else than the parser found."""
    messages: Sequence[ClientMessage]
    """The messages that it answers, until another turn has them in its history."""
    echoes: dict[bytes, EchoMatch] = field(default_factory=dict)
    """How the answer stands in each form in which its client has sent it back."""
    after: bytes = field(init=False)
    """The state of the conversation that its answer ends."""
    said: SegmentRole | None = field(init=False)
    """The role that its client says."""

    def __post_init__(self) -> None:
        self.after = digest(self.state, self.key)
        self.said = said_role(self.call)

    def match(self, message: ClientMessage) -> EchoMatch:
        key = echo_key(message)
        if key not in self.echoes:
            self.echoes[key] = compare(self.sent, message)
        return self.echoes[key]


@dataclass(slots=True)
class Match:
    """Where a call is among the recorded conversations."""

    state: bytes
    """All messages lead to it."""
    turn: RecordedTurn | None = None
    """The last turn whose answer stands after exactly the messages that it answered."""
    begin: int = 0
    """The first message after that answer; of all messages if there is no turn."""
    turns: dict[int, RecordedTurn] = field(default_factory=dict)
    """By the place of their answers, up to `begin`."""
    missing: RecordedTurn | None = None
    """A turn behind `turn` whose answer the client has left out."""
    changed: RecordedTurn | None = None
    """A turn behind `turn` whose answer the client has changed too much."""
    relative: RecordedTurn | None = None
    """The last that any message names or repeats, wherever it stands."""
    named: set[int] = field(default_factory=set)
    """Numbers of all turns that messages name or repeat."""
    answered: RecordedTurn | None = None
    """The turn whose answer is the last one in the messages, whatever became of those before it."""
    answered_at: int = 0
    has_foreign: bool = False
    """Whether an assistant's message is not a recorded answer, or a changed one."""


@dataclass(slots=True)
class TurnIndex:
    extends: frozenset[EchoMatch]
    calls: dict[str, ToolCall] = field(default_factory=dict)
    """By the ids that clients know."""
    _by_state: dict[bytes, list[RecordedTurn]] = field(default_factory=dict)
    _by_call: dict[str, RecordedTurn] = field(default_factory=dict)
    _by_key: dict[str, RecordedTurn] = field(default_factory=dict)
    _by_text: dict[str, RecordedTurn] = field(default_factory=dict)

    def add(self, turn: RecordedTurn) -> None:
        self._by_state.setdefault(turn.state, []).append(turn)
        self._by_key[turn.key] = turn
        parsed = turn.turn.message.tool_calls
        for call in turn.sent.calls:
            self._by_call[call.id] = turn
            if call.number < len(parsed):
                self.calls[call.id] = parsed[call.number]
        if not turn.sent.calls and turn.sent.text.strip():
            self._by_text[turn.sent.text.strip()] = turn

    def answers(self, state: bytes) -> Sequence[RecordedTurn]:
        return self._by_state.get(state, ())

    def match(self, messages: Sequence[ClientMessage], head: Head) -> Match:
        """Follow the messages along the recorded conversations as far as they go."""
        match = Match(head.key())
        for place, message in enumerate(messages):
            if place == 0 and message.role == "system":
                match.begin = 1
                continue
            if message.role == "assistant":
                self._follow_answer(match, place, message)
            else:
                if answers := self.answers(match.state):
                    match.missing = answers[0]
                match.state = extended(match.state, message)
        return match

    def _follow_answer(self, match: Match, place: int, message: ClientMessage) -> None:
        named = self._named(message)
        known = named or self._by_text.get(message.text.strip())
        if known is not None:
            match.relative = known
            match.named.add(known.turn.turn_id)
        found = self._standing_here(match.state, message, named)
        standing = EchoMatch.TEXT_CHANGED if found is None else found.match(message)
        if standing is not EchoMatch.TEXT_CHANGED:
            match.answered, match.answered_at = found, place
        elif known is not None and known.match(message) is not EchoMatch.TEXT_CHANGED:
            match.answered, match.answered_at = known, place
        else:
            match.has_foreign = True
        if found is not None and standing in self.extends:
            match.turn, match.begin = found, place + 1
            match.turns[place] = found
            match.missing = match.changed = None
            match.state = found.after
            return
        match.changed = found or match.changed
        match.state = extended(match.state, message)

    def _named(self, message: ClientMessage) -> RecordedTurn | None:
        """Find a turn by the id of a call or by its key."""
        for call in message.calls:
            if (turn := self._by_call.get(call.id or "")) is not None:
                return turn
        return self.named(message.turn_key)

    def named(self, key: str | None) -> RecordedTurn | None:
        return self._by_key.get(key or "")

    def _standing_here(self, state: bytes, message: ClientMessage, named: RecordedTurn | None) -> RecordedTurn | None:
        if named is not None:
            return named if named.state == state else None
        if message.calls and any(call.id is not None for call in message.calls):
            return None  # a call that is not the policy's
        text, said = message.text.strip(), None
        for turn in reversed(self.answers(state)):
            if not turn.delivered:
                continue
            sent = turn.sent.text.strip()
            if sent == text and same_calls(turn.sent, message):
                return turn
            if said is None and (sent or turn.sent.calls):
                said = turn
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    standings: Mapping[EchoMatch, int]
    """How answers stood when they came back, each form of each answer counted once."""
    forks: Mapping[ForkReason, int]
    malformed_calls: int
    undelivered: int
    """Answers that did not reach the client."""
    disagreements: int
    """Answers of which the client was sent something else than the parser found; each is a defect."""


_QUOTED_LINE = 20
"""Characters of the shortest line that shows a quotation."""


def said_role(call: ModelCall) -> SegmentRole | None:
    lane = call.lane
    if call.kind:
        return SegmentRole.MAIN if call.kind == "main" else SegmentRole.SIDE
    if lane.purpose == "side":
        return SegmentRole.SIDE
    if lane.purpose == "subagent" or lane.agent:
        return SegmentRole.SUBAGENT
    return None


def find_roles(turns: Sequence[RecordedTurn], compacted: frozenset[int]) -> Mapping[int, SegmentRole]:
    """Return the role of each turn by its id; turns in `compacted` wrote the text that replaced the agent's history.

    The client's own word holds. Of the other conversations, the first with tools is the agent's own, and so is each
    that goes on from it or has the same system prompt and tools; one without tools, or that must answer in a schema, is
    a side call; one with other tools is an agent that the agent started.
    """
    main = _main_root(turns)
    roles: dict[int, SegmentRole] = {}
    for each in turns:
        turn, before = each.turn, each.turn.lineage
        if each.said is not None:
            roles[turn.turn_id] = each.said
        elif turn.turn_id in compacted or each.call.lane.purpose == "compaction":
            roles[turn.turn_id] = SegmentRole.MAIN if before is None else roles[before.turn_id]
        elif turn.parent is not None:
            # The same head as before it; a client that asks for a schema may still end its conversation so.
            roles[turn.turn_id] = roles[turn.parent.turn_id]
        else:
            inherited = SegmentRole.MAIN if before is None else roles[before.turn_id]
            roles[turn.turn_id] = _role_of_root(each, main, inherited, alone=before is None)
    return roles


def role_of_new(
    turns: Sequence[RecordedTurn],
    compacted: frozenset[int],
    new: PlannedTurn,
    parent: TreeTurn | None,
    after: TreeTurn | None,
) -> SegmentRole:
    """Judge a turn that is not recorded yet by the recorded ones."""
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
    root: RecordedTurn | PlannedTurn, main: RecordedTurn | None, inherited: SegmentRole, *, alone: bool
) -> SegmentRole:
    if main is None or root is main or (root.head == main.head and not _has_only_schema(root, main)):
        return inherited
    if _has_only_schema(root, main) or (main.head.tools and not root.head.tools):
        return SegmentRole.SIDE
    if not alone:
        return inherited
    return SegmentRole.SUBAGENT if root.head.tools else SegmentRole.SIDE


def _has_only_schema(root: RecordedTurn | PlannedTurn, main: RecordedTurn) -> bool:
    return root.call.json_schema is not None and main.call.json_schema is None


def _main_root(turns: Sequence[RecordedTurn]) -> RecordedTurn | None:
    """Find the first turn of the agent's own conversation."""
    roots = [each for each in turns if each.said is None and each.turn.lineage is None]
    likely = sorted(roots, key=lambda each: (not each.head.tools, each.call.json_schema is not None))
    return next(iter(likely), None)


def quotes(text: str, answer: str) -> bool:
    """Look for at least half of an answer's lines, leaving out short ones."""
    lines = [line.strip() for line in answer.splitlines() if len(line.strip()) >= _QUOTED_LINE]
    return bool(lines) and sum([line in text for line in lines]) * 2 >= len(lines)


_UNSEEN_CHARS = 32
"""Characters, for each token of the context, that a chat format may leave out, as many leave out reasoning, and a turn
keeps all the same. Nobody has as many to say."""


def check_length(
    renderer: ChatRenderer,
    call: ModelCall,
    messages: Sequence[ClientMessage],
    match: Match,
    context_length: int,
    size: int = 0,
) -> None:
    """Refuse a prompt that is surely longer than the context, since rendering takes 36 bytes for each token, or whose
    turn would keep too much. One that is not refused may still be too long: the rendered ids tell exactly.

    `size` bounds the characters of all messages; 0 is an unknown size.

    Raises:
        ContextOverflowError: It is; its count of tokens is an estimate.
    """
    known, new = (match.turn.turn.end, messages[match.begin :]) if match.turn is not None else (0, messages)
    room = max(context_length - known, 1)
    texts = [message.text for message in new if message.role != "assistant"]
    if match.turn is None and call.tools:
        texts.append(orjson.dumps([dict(tool) for tool in call.tools]).decode())
    tokens = renderer.count_if_over(texts, room)
    if not 0 < size <= _UNSEEN_CHARS * room:
        unseen = sum(map(_unseen_chars, new))
        longest = max(map(_unseen_chars, messages), default=0)
        if unseen > _UNSEEN_CHARS * room or longest > _UNSEEN_CHARS * context_length:
            tokens = tokens or max(unseen, longest) // _UNSEEN_CHARS
    if tokens is not None:
        raise ContextOverflowError(known + tokens, context_length)


def _unseen_chars(message: ClientMessage) -> int:
    ids = (message.call_id, message.tool_name, message.turn_key, *(call.id for call in message.calls))
    unseen = sum([len(each) for each in ids if each])
    if message.role != "assistant":
        return unseen + len(message.text) - len(message.text.strip())
    calls = sum([len(call.name) + len(call.arguments) for call in message.calls])
    return unseen + len(message.text) + len(message.reasoning or "") + calls

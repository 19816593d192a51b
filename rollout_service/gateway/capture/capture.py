"""The conversations of one rollout, as its client's calls show them.

Each call extends the longest recorded conversation that its messages prove to extend, over the sampled ids themselves;
another begins a segment, for a counted reason. Every recorded turn is in the trajectory once, trained or not. A client
receives only text that the answer's ids decode to, and that text is recognized when it comes back.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple

from api_schemas.trajectories import FinishReason, ForkReason, Message, SegmentRole, ToolCall, Trajectory
from rollout_service.base.errors import InvalidFieldError
from rollout_service.engines.contract import NOTHING_RETURNED, Generation
from rollout_service.gateway.capture.echoes import (
    CaptureReport,
    EchoMatch,
    Match,
    RecordedTurn,
    TurnIndex,
    check_length,
    find_roles,
    quotes,
    role_of_new,
)
from rollout_service.gateway.capture.history import Head, as_messages
from rollout_service.gateway.capture.splitter import Splitter
from rollout_service.gateway.contract import (
    AnswerEnd,
    AnswerEvent,
    AnswerUsage,
    ClientMessage,
    ClientToolCall,
    ModelCall,
    TokenLogprob,
    map_roles,
)
from rollout_service.tokens import ChatRenderer, ToolSpec, TreePrompt, TurnTree


@dataclass(frozen=True, slots=True)
class CapturePolicy:
    extends: frozenset[EchoMatch] = frozenset(EchoMatch) - {EchoMatch.TEXT_CHANGED}
    """Answers that may be continued, by how they stand in their client's history."""
    trains: frozenset[SegmentRole] = frozenset({SegmentRole.MAIN})
    """Conversations whose turns may be trained on; never those that their client did not receive, nor those that had to
    fit a schema: their log-probabilities are not the policy's own."""


class _ForkCause(NamedTuple):
    reason: ForkReason
    after: RecordedTurn | None
    is_summary: bool = False
    """Whether the answer of `after` replaces the history."""


class PlannedTurn:
    def __init__(
        self,
        renderer: ChatRenderer,
        call: ModelCall,
        prompt: TreePrompt,
        head: Head,
        match: Match,
        messages: Sequence[ClientMessage],
        *,
        compacts: bool = False,
        key: str | None = None,
    ) -> None:
        """`compacts` tells whether the answer of the turn that it follows replaces its history; `key` is that of a turn
        which is captured again.
        """
        # Without what is large, since every turn keeps it: of a schema, only that there is one.
        light = replace(call, messages=(), tools=(), deferred_tools=(), declared_tools={}, answer_format=None)
        self.call = light if call.json_schema is None else replace(light, json_schema={})
        self.prompt = prompt
        self.head = head
        self.match = match
        self.messages = messages
        self.compacts = compacts
        self._renderer = renderer
        self.turn_key = key or secrets.token_hex(8)
        """Names the answer in the client's echo."""
        self._fed = 0
        prefix = f"call_{self.turn_key}"
        self._deferred = call.deferred_tools
        tools = (*call.tools, *call.deferred_tools)
        self.splitter = Splitter(renderer, prompt.ids, tools, call_prefix=prefix, stop=call.stop)
        self._finished = False

    @property
    def found_tools(self) -> Sequence[ToolSpec]:
        """The deferred tools that a complete answer calls, without which it would be read otherwise."""
        parsed = self.splitter.parsed
        called = {call.name for call in parsed.tool_calls} if parsed is not None else set[str | None]()
        return [tool for tool in self._deferred if tool["function"]["name"] in called]

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.prompt.ids

    @property
    def follows(self) -> RecordedTurn | None:
        """The recorded turn whose answer is the last one in the call's messages."""
        return self.match.answered

    @property
    def since(self) -> Sequence[ClientMessage]:
        """The messages since the answer of that turn; none if there is no such turn."""
        if self.match.answered is None:
            return ()
        after = self.messages[self.match.answered_at + 1 :]
        return tuple(takewhile(lambda message: message.role != "assistant", after))

    @property
    def known(self) -> int:
        """How many of `prompt_ids` are those of the turn that the call continues, with its output."""
        return self.prompt.known

    def feed(self, ids: Sequence[int]) -> list[AnswerEvent]:
        """Return the events that these ids complete; half a character or a possible stop waits."""
        self._fed += len(ids)
        return self.splitter.feed(ids)

    def finish(self, generation: Generation) -> list[AnswerEvent]:
        """Return the remaining events, `AnswerEnd` last, also of ids that were not fed before.

        Raises:
            ValueError: The engine aborted the generation, so the answer has no end.
        """
        if generation.finish_reason is FinishReason.ABORT:
            raise ValueError("an aborted generation is not the end of an answer")
        events = [*self.complete(generation)]
        matched = generation.matched if generation.matched in self.call.stop else None
        stopped_by = self.splitter.stopped_by or (str(matched) if matched is not None else None)
        usage = AnswerUsage(
            prompt_tokens=len(self.prompt.ids),
            cached_tokens=generation.cached_tokens,
            sampled_tokens=len(generation.output_ids),
            reasoning_tokens=self.splitter.reasoning_tokens,
        )
        logprobs = self._logprobs(generation) if self.call.logprobs else ()
        return [*events, AnswerEnd(generation.finish_reason, usage, stopped_by, logprobs)]

    def _logprobs(self, generation: Generation) -> tuple[TokenLogprob, ...]:
        sampled = zip(generation.output_ids, generation.logprobs, strict=False)
        texts = {token: self._renderer.decode([token]) for token in set(generation.output_ids)}
        return tuple([TokenLogprob(texts[token], logprob) for token, logprob in sampled])

    def complete(self, generation: Generation) -> list[AnswerEvent]:
        """Return the events of the missing ids; nothing the second time."""
        if self._finished:
            return []
        self._finished = True
        events = self.feed(generation.output_ids[self._fed :])
        return [*events, *self.splitter.finish()]


@dataclass(slots=True)
class TurnCapture:
    """The conversations of one rollout, as a tree of turns. Not for use from two threads at once."""

    renderer: ChatRenderer
    policy: CapturePolicy = CapturePolicy()
    _tree: TurnTree = field(init=False)
    _index: TurnIndex = field(init=False)
    _turns: list[RecordedTurn] = field(init=False, default_factory=list)
    _by_id: dict[int, RecordedTurn] = field(init=False, default_factory=dict)
    _compacted: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._tree = TurnTree(self.renderer)
        self._index = TurnIndex(self.policy.extends)

    def plan(self, call: ModelCall, context_length: int | None = None) -> PlannedTurn:
        """Find the turn that a call continues, and make its prompt, which may take long.

        With `context_length`, a prompt that is much longer is refused before it is rendered.

        Raises:
            InvalidFieldError: The client refers to an answer that is none of these conversations.
            ContextOverflowError: The prompt is much longer than the context.
            TokenError: The messages cannot be rendered.
        """
        whole = tuple([self._resolved(message) if message.references else message for message in call.messages])
        messages = map_roles(whole)
        head = Head.of(messages, call.tools)
        match = self._index.match(messages, head)
        if context_length is not None:
            size = call.size if whole == call.messages else 0  # a short reference may stand for a long answer
            check_length(self.renderer, call, messages, match, context_length, size)
        if (extended := self._extend(call, messages, match)) is not None:
            return PlannedTurn(self.renderer, call, extended, head, match, messages)
        cause = self._why(call, messages, match, head)
        prompt = self._begin(call, messages, cause)
        compacts = cause.is_summary
        return PlannedTurn(self.renderer, call, prompt, head, match, messages, compacts=compacts)

    def record(self, planned: PlannedTurn, generation: Generation, *, delivered: bool) -> None:
        """Keep a turn; one that was not delivered to the client is kept without being trained on.

        Raises:
            RecordError: The engine's answer cannot be trained on.
        """
        turn = self._tree.record(
            planned.prompt,
            generation.output_ids,
            generation.logprobs,
            generation.versions,
            generation.finish_reason,
            generation.extras if generation.extras is not NOTHING_RETURNED else None,
            trained=delivered,
            parsed=planned.splitter.parsed,
        )
        planned.complete(generation)
        recorded = RecordedTurn(
            turn=turn,
            key=planned.turn_key,
            head=planned.head,
            state=planned.match.state,
            sent=planned.splitter.sent,
            call=planned.call,
            delivered=delivered,
            malformed=planned.splitter.malformed,
            disagreed=planned.splitter.disagreed,
            messages=planned.messages,
        )
        if planned.compacts and turn.after is not None:
            self._compacted.add(turn.after.turn_id)
        if delivered and turn.parent is not None:  # the history of this turn has the messages of that one
            self._by_id[turn.parent.turn_id].messages = ()
        self._turns.append(recorded)
        self._by_id[turn.turn_id] = recorded
        self._index.add(recorded)

    def skip(self) -> None:
        """Use up the id of a turn that may not be kept."""
        self._tree.skip()

    @property
    def next_id(self) -> int:
        return self._tree.next_id

    @property
    def turns(self) -> Mapping[int, RecordedTurn]:
        """By their ids, in the order in which they ended."""
        return self._by_id

    @property
    def calls(self) -> Mapping[str, ToolCall]:
        return self._index.calls

    def same_as(self, planned: PlannedTurn) -> Sequence[RecordedTurn]:
        return self._index.answers(planned.match.state)

    def role_of(self, planned: PlannedTurn) -> SegmentRole:
        """Return a turn's role, as far as the calls tell now."""
        prompt, compacted = planned.prompt, frozenset(self._compacted)
        if planned.compacts and prompt.after is not None:
            compacted |= {prompt.after.turn_id}
        return role_of_new(self._turns, compacted, planned, prompt.parent, prompt.after)

    def trajectory(self) -> Trajectory:
        """Return all that was recorded, with the messages of the agent's own last turn."""
        messages = self.messages()  # first: it decides what each turn is trained as
        return self._tree.trajectory(messages)

    def messages(self) -> list[Message]:
        """Return the conversation of the agent's own last turn, with its answer.

        It is the last turn whose answer reached the client, if there is one.
        """
        roles = self._assign_roles()
        own = [each for each in self._turns if each.messages and roles[each.turn.turn_id] is SegmentRole.MAIN]
        if not own:
            return []
        last = next((each for each in reversed(own) if each.delivered), own[-1])
        return [*as_messages(last.messages, self._index.calls), last.turn.message]

    def report(self) -> CaptureReport:
        echoes = (standing for each in self._turns for standing in each.echoes.values())
        return CaptureReport(
            standings=Counter(echoes),
            forks=self._tree.fork_counts(),
            malformed_calls=sum([each.malformed for each in self._turns]),
            undelivered=sum([not each.delivered for each in self._turns]),
            disagreements=sum([each.disagreed for each in self._turns]),
        )

    def _assign_roles(self) -> Mapping[int, SegmentRole]:
        """Decide anew whose conversation each turn is in, since later calls tell more of earlier ones."""
        roles = find_roles(self._turns, frozenset(self._compacted))
        for each in self._turns:
            each.turn.role = roles[each.turn.turn_id]
            is_own = each.delivered and each.call.json_schema is None
            each.turn.trained = is_own and each.turn.role in self.policy.trains
        return roles

    def _resolved(self, message: ClientMessage) -> ClientMessage:
        """Fill in the parts of an answer that the client names in the place of sending them."""
        if (turn := self._index.named(message.turn_key)) is None:
            raise InvalidFieldError.at("input", "refers to an item of no answer in this session: send the item itself")
        sent, named = turn.sent, message.references
        calls = tuple(ClientToolCall(one.id, one.name, one.arguments) for one in sent.calls)
        return message._replace(
            text=sent.text if "text" in named else message.text,
            reasoning=sent.reasoning or None if "reasoning" in named else message.reasoning,
            calls=calls if "calls" in named else message.calls,
            references=frozenset(),
        )

    def _extend(self, call: ModelCall, messages: Sequence[ClientMessage], match: Match) -> TreePrompt | None:
        new = messages[match.begin :]
        if match.turn is None or not new or any(message.role == "assistant" for message in new):
            return None
        turn = match.turn.turn
        reason = ForkReason.BRANCH if match.missing is None else ForkReason.ANSWER_MISSING
        history: list[Message] = []
        if self.renderer.rereads_history:
            history = self._history(messages[: match.begin], match)
        calls = turn.message.tool_calls
        return self._tree.extend(turn, as_messages(new, self._index.calls, calls), call.tools, history, reason)

    def _history(self, messages: Sequence[ClientMessage], match: Match) -> list[Message]:
        """Render messages, with each answer as it was sampled."""
        rendered = as_messages(messages, self._index.calls)
        return [
            match.turns[place].turn.message if place in match.turns else message
            for place, message in enumerate(rendered)
        ]

    def _begin(self, call: ModelCall, messages: Sequence[ClientMessage], cause: _ForkCause) -> TreePrompt:
        after = cause.after.turn if cause.after is not None else None
        return self._tree.begin(as_messages(messages, self._index.calls), call.tools, cause.reason, after)

    def _why(self, call: ModelCall, messages: Sequence[ClientMessage], match: Match, head: Head) -> _ForkCause:
        if match.turn is not None:
            return _ForkCause(self._why_not_extended(messages, match), match.turn)
        again = self._index.answers(match.state)
        if again:
            return _ForkCause(ForkReason.BRANCH, again[0])
        summary = self._summary(messages, match, head)
        if summary is not None:
            return _ForkCause(ForkReason.COMPACTION, summary, is_summary=True)
        if match.changed is not None:
            return _ForkCause(ForkReason.ANSWER_CHANGED, match.changed)
        if match.relative is not None:
            return _ForkCause(self._why_changed(call, match.relative, match, head), match.relative)
        missing = match.missing
        return _ForkCause(ForkReason.NEW_ROOT if missing is None else ForkReason.ANSWER_MISSING, missing)

    def _why_changed(self, call: ModelCall, relative: RecordedTurn, match: Match, head: Head) -> ForkReason:
        if call.lane.purpose == "compaction":
            return ForkReason.COMPACTION
        if relative.head.tools != head.tools:
            return ForkReason.TOOLS_CHANGED
        if relative.head != head:
            return ForkReason.SYSTEM_CHANGED
        before = relative.turn.lineage
        forgotten = before is not None and match.named == {relative.turn.turn_id}
        return ForkReason.COMPACTION if forgotten else ForkReason.HISTORY_EDITED

    def _why_not_extended(self, messages: Sequence[ClientMessage], match: Match) -> ForkReason:
        if match.changed is not None:
            return ForkReason.ANSWER_CHANGED
        if match.relative is not match.turn:
            return ForkReason.HISTORY_EDITED
        if any(message.role == "assistant" for message in messages[match.begin :]):
            return ForkReason.FOREIGN_ASSISTANT
        return ForkReason.BRIDGE_REFUSED

    def _summary(self, messages: Sequence[ClientMessage], match: Match, head: Head) -> RecordedTurn | None:
        """Find the turn whose answer replaces the history of a conversation with a known head."""
        if not any(each.head == head for each in self._turns):
            return None
        text = "\n".join(message.text for message in messages if message.role == "user")
        answers = [each for each in reversed(self._turns) if each.delivered and not each.sent.calls]
        found = next((each for each in answers if quotes(text, each.sent.text)), None)
        if found is None and answers and answers[0] is self._turns[-1]:
            last, repeated = answers[0], match.relative
            # A client says what its call was for, or takes the answer of a call beside the conversation into it.
            if last.call.lane.purpose == "compaction" or (last is repeated and last.head != head):
                found = last
        return found

"""Sampled ids as events of an answer, while they are sampled: reasoning, text and tool calls. Pure and synchronous.

The events, joined, are the same however the ids were cut into pieces, and equal to the parts that `ChatRenderer.parse`
finds in all of them:

- reasoning and text without the white space around them;
- each well-formed call, its arguments as they were sampled if that was JSON;
- each malformed call as text, after the text of the answer and as the chat format would render it; one that turns out
  to be malformed after its name was sent ends with its error.

Where the tokens do not prove what comes next, events wait for the end. Unlike the parser's result, an answer ends at a
stop string of the client in its reasoning or text, and one that the parser cannot read at all keeps the part that was
sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from api_schemas.trajectories import ToolCall
from rollout_service.gateway.capture.text_stream import Channel, JsonCall, SentAnswer, StopFilter, TextStream
from rollout_service.gateway.contract import AnswerEvent
from rollout_service.tokens import ChatRenderer, ParsedTurn, ToolSpec

_UNPARSEABLE = "unparseable"
_UNCLOSED = "unclosed_block"
_CHANGED = "changed_after_sending"
_END_OF_REASONING = "</think>"
_HEADER = "<|im_start|>"
"""Where an answer may repeat the beginning of its own turn, which the parser leaves out."""


class _Region(Enum):
    REASONING = auto()
    UNCLEAR = auto()
    """A call or still reasoning; only a later token tells."""
    TEXT = auto()
    CALL = auto()
    BETWEEN = auto()
    """After a call, in formats that leave out text there."""
    WAIT = auto()
    """Nothing can be told before the end."""
    OVER = auto()


class Splitter:
    def __init__(
        self,
        renderer: ChatRenderer,
        prompt_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        *,
        call_prefix: str = "call",
        stop: tuple[str, ...] = (),
    ) -> None:
        """Calls get the ids `{call_prefix}_{index}`; the text ends before the first of the `stop` strings."""
        self.sent = SentAnswer()
        self.malformed = 0
        self.disagreed = False
        """The answer that was sent differs from the parser's result."""
        self.parsed: ParsedTurn | None = None
        """Once every id was fed."""
        self._renderer = renderer
        self._prompt = prompt_ids
        self._tools = tools
        self._call_prefix = call_prefix
        self._format = stream_format(renderer)
        self._ids: list[int] = []
        self._reasoning_ids = 0
        self._unclear: list[int] = []
        self._block: list[int] = []
        self._block_text = TextStream(renderer.decode)
        self._call: JsonCall | None = None
        self._blocks = 0
        self._read = 0
        self._broken: list[str] = []
        thinks = renderer.begins_in_reasoning(prompt_ids)
        self._region = _Region.WAIT if self._format is None else _Region.REASONING if thinks else _Region.TEXT
        self._may_begin_reasoning = not thinks
        self._marks = self._find_marks(thinks)
        header = renderer.encode(_HEADER)
        self._header = header[0] if len(header) == 1 else None
        spelled = self._format is not None and self._format.text_ends_reasoning
        self._spelled = StopFilter((_END_OF_REASONING,) if spelled else ())
        self._stops = (StopFilter(stop), StopFilter(stop))
        self._reasoning = Channel(renderer.decode, (self._spelled, self._stops[0]), self.sent.add_reasoning)
        self._text = Channel(renderer.decode, self._stops[1:], self.sent.add_text)

    @property
    def stopped_by(self) -> str | None:
        return self._stops[0].found or self._stops[1].found

    @property
    def reasoning_tokens(self) -> int:
        if self._region is _Region.WAIT:
            return len(self._renderer.encode(self.sent.reasoning))
        return self._reasoning_ids

    def feed(self, ids: Sequence[int]) -> list[AnswerEvent]:
        plain: list[int] = []
        for token in ids:
            if not self._ids and token == self._header:
                self._region = _Region.WAIT
            if token in self._marks:
                self._push(plain)
                plain = [] if self._mark(token) else [token]
            else:
                plain.append(token)
            self._ids.append(token)
        self._push(plain)
        return self.sent.take()

    def finish(self) -> list[AnswerEvent]:
        """Return the remaining events; every id was fed."""
        parsed = self.parsed = self._renderer.parse(self._ids, self._prompt, self._tools, self._call_prefix)
        self.malformed = sum([call.error is not None for call in parsed.tool_calls])
        if self.stopped_by is None:
            self._send_rest(parsed)
        if self._in_call:
            self.sent.end_call(_UNCLOSED)
        return self.sent.take()

    def _find_marks(self, thinks: bool) -> frozenset[int]:
        known = self._format
        if known is None:
            return frozenset()
        tags = [known.call, known.call_end]
        if thinks or not known.tagged:  # a tagged format that does not think writes its tags as text
            tags += [known.think, known.think_end]
        return frozenset([*tags, *self._renderer.stop_token_ids])

    def _push(self, ids: Sequence[int]) -> None:
        if not ids:
            return
        if self._region is _Region.REASONING:
            self._reasoning_ids += len(ids)
            self._reasoning.push(ids)
        elif self._region is _Region.UNCLEAR:
            self._unclear += ids
        elif self._region is _Region.TEXT:
            self._text.push(ids)
        elif self._region is _Region.CALL:
            self._block += ids
            self._push_call(self._block_text.push(ids))
        if self.stopped_by is not None:
            self._region = _Region.OVER
        elif self._spelled.found is not None:
            self._region = _Region.WAIT

    def _mark(self, token: int) -> bool:
        """Read a control token; return False if it is text here."""
        known = self._format
        if known is None or self._region in (_Region.WAIT, _Region.OVER):
            return True
        if token in self._renderer.stop_token_ids:
            self._region = _Region.OVER
            return True
        if self._region is _Region.CALL:
            if token == known.call_end:
                self._end_block(known)
            return token == known.call_end
        take = self._mark_tagged if known.tagged else self._mark_reasoning_first
        return take(token, known)

    def _mark_tagged(self, token: int, known: StreamFormat) -> bool:
        channel = self._reasoning if self._region is _Region.REASONING else self._text
        if token == known.call_end:
            return False
        channel.end_region(goes_on=True)
        if token == known.call:
            self._begin_block(known)
        else:
            self._region = _Region.REASONING if token == known.think else _Region.TEXT
        return True

    def _mark_reasoning_first(self, token: int, known: StreamFormat) -> bool:
        if self._region is _Region.REASONING:
            return self._mark_in_reasoning(token, known)
        if self._region is _Region.UNCLEAR:
            return self._mark_in_unclear(token, known)
        if token == known.call:
            self._text.end_region(goes_on=False)
            self._begin_block(known)
            return True
        if token == known.think and self._may_begin_reasoning:
            self._may_begin_reasoning = False
            if not self._renderer.decode(self._ids).strip():
                self._region = _Region.REASONING
                return True
        return self._region is _Region.BETWEEN

    def _mark_in_reasoning(self, token: int, known: StreamFormat) -> bool:
        if token == known.call:
            self._region, self._unclear = _Region.UNCLEAR, [token]
        elif token == known.think_end:
            self._reasoning.end_region(goes_on=False)
            self._region = _Region.TEXT
        return token != known.call_end

    def _mark_in_unclear(self, token: int, known: StreamFormat) -> bool:
        if token == known.think_end:
            self._region = _Region.REASONING
            self._push(self._unclear)
            return self._mark(token)
        return token == known.think

    def _begin_block(self, known: StreamFormat) -> None:
        self._region, self._block = _Region.CALL, [known.call]
        self._call = JsonCall() if known.json_calls else None

    @property
    def _in_call(self) -> bool:
        """The name of a call was sent, and its end was not."""
        return bool(self.sent.calls) and not self.sent.calls[-1].ended

    def _push_call(self, text: str) -> None:
        if self._call is None:
            return
        arguments = self._call.push(text)
        if self._call.name is not None and not self._in_call:
            self._send_name(self._call.name, self._read)
        if arguments:
            self.sent.add_arguments(arguments)

    def _end_block(self, known: StreamFormat) -> None:
        self._push_call(self._block_text.end())
        self._region = _Region.TEXT if known.tagged else _Region.BETWEEN
        self._blocks += 1
        for call in self._renderer.parse([*self._block, known.call_end], None, self._tools).tool_calls:
            self._send_call(call)

    def _send_call(self, call: ToolCall) -> None:
        """Send a complete call, or the rest of it; a malformed one is text, and waits."""
        self._read += 1
        if self._in_call:
            self.sent.end_call(call.error or self._difference(call))
        elif call.error is not None or call.name is None:
            self._broken.append(call.raw)
        else:
            self._send_name(call.name, self._read - 1)
            self.sent.add_arguments(json.dumps(call.arguments, ensure_ascii=False))
            self.sent.end_call()

    def _send_name(self, name: str, number: int) -> None:
        self.sent.begin_call(f"{self._call_prefix}_{len(self.sent.calls)}", name, number)

    def _difference(self, call: ToolCall) -> str | None:
        """Return an error if the sent part differs, as of a call that says its name twice."""
        sent = self.sent.calls[-1]
        same = sent.name == call.name and json.loads(sent.arguments) == call.arguments
        return None if same else _CHANGED

    def _send_rest(self, parsed: ParsedTurn) -> None:
        if [call.error for call in parsed.tool_calls] == [_UNPARSEABLE]:
            self._send_text(self._held_text(parsed.tool_calls[0].raw))
            return
        calls = parsed.tool_calls[self._blocks :]
        if self._in_call and calls:
            self._send_call(calls[0])
            calls = calls[1:]
        reasoning = _before_stop((parsed.reasoning or "").strip(), self._stops[0])
        self._rest(self.sent.reasoning, reasoning, self.sent.add_reasoning)
        self._send_text(parsed.content.strip())
        for call in calls if self.stopped_by is None else ():
            self._send_call(call)
        self._send_text("\n".join(filter(None, [parsed.content.strip(), *self._broken])))

    def _send_text(self, whole: str) -> None:
        if self.stopped_by is None:
            self._rest(self.sent.text, _before_stop(whole, self._stops[1]), self.sent.add_text)

    def _held_text(self, raw: str) -> str:
        """For an answer that cannot be parsed, return the part that was sent, and the rest if it is known."""
        if not (self.sent.reasoning or self.sent.text or self.sent.calls):
            return raw
        return "\n".join(filter(None, [self.sent.text, *self._broken]))

    def _rest(self, sent: str, whole: str, send: Callable[[str], None]) -> None:
        if whole.startswith(sent):
            send(whole[len(sent) :])
        else:
            self.disagreed = True


def _before_stop(whole: str, stops: StopFilter) -> str:
    found = [(at, stop) for stop in stops.stops if (at := whole.find(stop)) >= 0]
    if not found:
        return whole
    at, stops.found = min(found)
    return whole[:at].rstrip()


_JSON = frozenset({"qwen3", "qwen3-vl"})
_XML = frozenset({"qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"})
_TAGGED = frozenset({"glm-4.5", "glm-5", "glm-5.1", "glm-5.3"})


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The control tokens between the parts of an answer, and the properties that follow from them.

    In every such format a part begins and ends with control tokens, so that text which only looks like one ends
    nothing. In all others an answer is read when it is complete.
    """

    think: int
    think_end: int
    call: int
    call_end: int
    json_calls: bool
    """Calls are JSON objects, whose arguments can be told before their end."""
    tagged: bool
    """A call ends reasoning, text goes on after a call, and reasoning may begin anywhere."""
    text_ends_reasoning: bool
    """The token that ends reasoning ends it also when it is spelled out as text."""


def stream_format(renderer: ChatRenderer) -> StreamFormat | None:
    """Return None if answers are read only when they are complete."""
    if renderer.name not in _JSON | _XML | _TAGGED:
        return None
    found = [renderer.encode(text) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    if any(len(ids) != 1 for ids in found):
        return None
    think, think_end, call, call_end = (ids[0] for ids in found)
    is_json = renderer.name in _JSON
    return StreamFormat(think, think_end, call, call_end, is_json, renderer.name in _TAGGED, is_json)

"""A whole answer, put together from the events that a stream would carry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from rollout_service.gateway.contract import (
    AnswerBegin,
    AnswerEnd,
    AnswerEvent,
    AnswerUsage,
    CallArguments,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)


@dataclass(slots=True)
class TextPart:
    text: str
    is_reasoning: bool


@dataclass(slots=True)
class CallPart:
    call_id: str
    name: str
    arguments: str = ""
    error: str | None = None


@dataclass(slots=True)
class WholeAnswer:
    """The parts of an answer in their order, none of them empty but for the arguments of calls."""

    begin: AnswerBegin
    parts: list[TextPart | CallPart] = field(default_factory=list)
    end: AnswerEnd | None = None

    @classmethod
    def of(cls, events: Iterable[AnswerEvent]) -> WholeAnswer:
        """Put an answer together; the first event is its begin."""
        first, *rest = events
        if not isinstance(first, AnswerBegin):
            raise TypeError(f"an answer begins with AnswerBegin, not {type(first).__name__}")
        answer = cls(first)
        for event in _merged(rest):
            answer._add(event)
        return answer

    @property
    def text(self) -> str:
        """Without reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart) and not part.is_reasoning)

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart) and part.is_reasoning)

    @property
    def calls(self) -> list[CallPart]:
        return [part for part in self.parts if isinstance(part, CallPart)]

    @property
    def finish(self) -> AnswerEnd:
        if self.end is None:
            raise ValueError("the answer has not ended")
        return self.end

    def events(self) -> Iterator[AnswerEvent]:
        """Yield events of which the answer can be put together again, as few as possible."""
        yield self.begin
        calls = 0
        for part in self.parts:
            if isinstance(part, CallPart):
                yield CallBegin(calls, part.call_id, part.name)
                yield CallArguments(calls, part.arguments)
                yield CallEnd(calls, part.error)
                calls += 1
            else:
                yield ReasoningDelta(part.text) if part.is_reasoning else TextDelta(part.text)
        yield self.finish

    def _add(self, event: AnswerEvent) -> None:
        last = self.parts[-1] if self.parts else None
        match event:
            case ReasoningDelta(text) | TextDelta(text) if text:
                self.parts.append(TextPart(text, isinstance(event, ReasoningDelta)))
            case CallBegin(_, call_id, name):
                self.parts.append(CallPart(call_id, name))
            case CallArguments(_, text) if isinstance(last, CallPart):
                last.arguments += text
            case CallEnd(_, error) if isinstance(last, CallPart):
                last.error = error
            case AnswerEnd():
                self.end = event


def _merged(events: Iterable[AnswerEvent]) -> Iterator[AnswerEvent]:
    """Join deltas that follow each other: adding them one by one takes time by the square of their text's length."""
    for _, run in groupby(events, type):
        same = list(run)
        first = same[0]
        texts = [each.text for each in same if isinstance(each, ReasoningDelta | TextDelta | CallArguments)]
        if isinstance(first, ReasoningDelta | TextDelta | CallArguments):
            yield replace(first, text="".join(texts))
        else:
            yield from same


def summed_usage(answers: Sequence[WholeAnswer]) -> AnswerUsage:
    """Sum the usage of answers to one prompt, which is counted once."""
    costs = [answer.finish.usage for answer in answers]
    return AnswerUsage(
        prompt_tokens=costs[0].prompt_tokens,
        cached_tokens=costs[0].cached_tokens,
        sampled_tokens=sum(cost.sampled_tokens for cost in costs),
        reasoning_tokens=sum(cost.reasoning_tokens for cost in costs),
    )

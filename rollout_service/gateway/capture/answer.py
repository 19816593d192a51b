"""An answer as its client receives it: the events that were sent, and the same joined."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout_service.gateway.contract import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)


@dataclass(slots=True)
class SentCall:
    """A tool call as it was sent."""

    id: str
    name: str
    number: int
    """Its place among the calls that the parser finds, malformed ones included."""
    arguments: str = ""
    error: str | None = None
    ended: bool = False


@dataclass(slots=True)
class SentAnswer:
    """The part of an answer that its client has received, and the events that it has not."""

    reasoning: str = ""
    text: str = ""
    calls: list[SentCall] = field(default_factory=list)
    _events: list[AnswerEvent] = field(default_factory=list)

    def add_reasoning(self, text: str) -> None:
        """Send more reasoning."""
        if text:
            self.reasoning += text
            self._events.append(ReasoningDelta(text))

    def add_text(self, text: str) -> None:
        """Send more text."""
        if text:
            self.text += text
            self._events.append(TextDelta(text))

    def begin_call(self, call_id: str, name: str, number: int) -> None:
        """Begin a tool call, which is the parser's call of this number."""
        self._events.append(CallBegin(len(self.calls), call_id, name))
        self.calls.append(SentCall(call_id, name, number))

    def add_arguments(self, text: str) -> None:
        """Send more of the last call's arguments."""
        if text:
            self.calls[-1].arguments += text
            self._events.append(CallArguments(len(self.calls) - 1, text))

    def end_call(self, error: str | None = None) -> None:
        """End the last call."""
        self.calls[-1].error, self.calls[-1].ended = error, True
        self._events.append(CallEnd(len(self.calls) - 1, error))

    def take(self) -> list[AnswerEvent]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events

"""One request that a scripted engine is answering: its progress, its versions, and its faults."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

import anyio
import orjson
from aiohttp import web

from rollout_service.testing.script import Reply


class Fault(StrEnum):
    """One way in which a request can go wrong."""

    DROP = "drop"
    """The connection is closed without an answer."""
    HANG = "hang"
    GARBAGE = "garbage"
    ERROR = "error"
    NO_LOGPROBS = "no_logprobs"
    SHORT_LOGPROBS = "short_logprobs"
    BAD_ID = "bad_id"
    """A sampled id is outside the vocabulary."""
    BAD_LOGPROB = "bad_logprob"
    """A logprob is null, as servers write NaN."""
    NO_EXTRAS = "no_extras"
    """The extras that were asked for are left out."""
    SHORT_EXTRAS = "short_extras"
    """One entry of each extra is missing."""
    QUEUE_ABORT = "queue_abort"
    """The answer is an abort without tokens, logprobs or counts, like SGLang's for a request in its queue."""
    DIE = "die"
    """The engine closes every connection and stops listening."""
    CUT = "cut"
    """The answer ends early, as if it were whole."""


@dataclass(frozen=True, slots=True)
class AfterTokens:
    """A fault that strikes a streamed answer once so many tokens were sent, and other answers as a whole."""

    tokens: int
    fault: Fault


BREAKING = frozenset({Fault.DROP, Fault.HANG, Fault.GARBAGE, Fault.ERROR, Fault.QUEUE_ABORT, Fault.DIE, Fault.CUT})
"""Faults of the whole answer: nothing is sampled."""


# The numbers that scripted engines return are made up, but each depends only on its token or its absolute position. So
# tests know every number of any generation, wherever and however often it was interrupted.

SAMPLED_LOGPROB = -0.5
_EXPERTS = 64


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    rid: str
    ids: list[int]
    budget: int
    top_logprobs: int = 0
    prompt_logprobs_from: int | None = None
    """The index of the first prompt token in the answer's list; None for no list."""
    routed_experts_from: int | None = None


def likeliest(token: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """Return the likeliest ids with their logprobs, best first: the sampled `token` and the ids that follow it."""
    return [((token + rank) % vocab_size, SAMPLED_LOGPROB - rank) for rank in range(min(count, vocab_size))]


def prompt_logprob(position: int) -> float:
    return -1.0 - position / 1024


def experts(first: int, tokens: int, shape: tuple[int, int]) -> Iterator[list[list[int]]]:
    """Yield the experts that read each of `tokens` tokens from `first` on, as `[layers, experts per token]`."""
    layers, width = shape
    for position in range(first, first + max(tokens, 0)):
        yield [[(position + 3 * layer + slot) % _EXPERTS for slot in range(width)] for layer in range(layers)]


@dataclass(slots=True, eq=False)
class EngineTurn:
    asked: ScriptedRequest
    reply: Reply
    done: int = 0
    since: int = 0
    """Tokens of earlier chunks."""
    seconds: float = 0.0
    elapsed: float = 0.0
    cached_tokens: int = 0
    aborted: bool = False
    stream: "ChunkStream | None" = None
    ignores_pause: bool = False
    """Whether it continues during a pause, as open requests do in vLLM's mode `wait`."""
    before_sampling: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Covers the time in the queue and the reading of the prompt; an abort cancels it."""
    spans: list[tuple[str, int]] = field(default_factory=list)
    """Versions, each with the number of tokens at which it ended."""
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rid(self) -> str:
        return self.asked.rid

    @property
    def prompt_tokens(self) -> int:
        return len(self.asked.ids)

    @property
    def sampled(self) -> list[int]:
        """The tokens sampled so far, without those of earlier chunks."""
        return list(self.reply.ids[self.since : self.done])

    def seconds_to_next(self) -> float:
        """Return the time until the next chunk is sampled, or until the end of a turn that is not streamed."""
        tokens = len(self.reply.ids)
        if self.stream is None or not tokens:
            return self.seconds - self.elapsed
        return self.seconds * min(self.stream.next_end, tokens) / tokens - self.elapsed

    def finish_reason(self) -> dict[str, object]:
        if self.aborted:
            return {"type": "abort", "message": "Aborted by request"}
        if self.reply.stops:
            return {"type": "stop", "matched": self.reply.ids[-1]}
        return {"type": "length", "length": self.done}

    def version_spans(self, version: str) -> list[dict[str, object]]:
        """Return which version sampled which tokens; `version` sampled the last."""
        spans: list[dict[str, object]] = []
        start = 0
        for name, end in [*self.spans, (version, self.done)]:
            if spans and spans[-1]["version"] == name:
                spans[-1]["end"] = end
            elif end > start:
                spans.append({"version": name, "start": start, "end": end})
            start = end
        return spans


_DONE = b"data: [DONE]\n\n"
_TEXTS = {
    Fault.GARBAGE: b'data: {"meta_info": {"completion_tok\n\n',
    Fault.ERROR: b'data: {"error": {"message": "scripted failure", "code": 500}}\n\n' + _DONE,
    Fault.CUT: _DONE,
}


class Render(Protocol):
    """Returns the events of a part of a turn; the last one has the end of the answer."""

    def __call__(self, turn: EngineTurn, fault: Fault | None, *, is_last: bool) -> list[dict[str, Any]]: ...


class EndOfStreamError(Exception):
    pass


@dataclass(slots=True)
class ChunkStream:
    """Streams a turn while it is sampled: the first token alone, then chunks of `interval` tokens."""

    request: web.BaseRequest
    interval: int
    render: Render
    fault: AfterTokens | None
    break_off: Callable[[Fault, web.BaseRequest], Awaitable[object]]
    sent: int = 0
    response: web.StreamResponse = field(
        default_factory=lambda: web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    )

    @property
    def next_end(self) -> int:
        return self.sent + self.interval if self.sent else 1

    async def advance(self, turn: EngineTurn) -> None:
        """Send all whole chunks of the sampled ids; the turn's last token stays for the end."""
        while self.next_end <= min(turn.done, len(turn.reply.ids) - 1):
            await self._send(turn, self.next_end, is_last=False)

    async def end(self, turn: EngineTurn) -> None:
        await self._send(turn, turn.done, is_last=True)
        await self._write(_DONE)

    async def _send(self, turn: EngineTurn, end: int, *, is_last: bool) -> None:
        fault = self.fault.fault if self.fault is not None and end > self.fault.tokens else None
        if fault in _TEXTS:
            await self._write(_TEXTS[fault])
            raise EndOfStreamError
        if fault in {Fault.DROP, Fault.DIE, Fault.HANG}:
            await self.break_off(fault, self.request)
            raise EndOfStreamError
        for event in self.render(replace(turn, since=self.sent, done=end), fault, is_last=is_last):
            await self._write(b"data: " + orjson.dumps(event) + b"\n\n")
        if fault is Fault.QUEUE_ABORT:
            await self._write(_DONE)
            raise EndOfStreamError
        self.sent = end

    async def _write(self, data: bytes) -> None:
        if not self.response.prepared:
            await self.response.prepare(self.request)
        await self.response.write(data)

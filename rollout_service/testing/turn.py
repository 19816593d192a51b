"""One request that a scripted engine is answering, with its progress and its versions."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from rollout_service.testing.figures import ScriptedRequest
from rollout_service.testing.script import Reply

if TYPE_CHECKING:
    from rollout_service.testing.chunks import ChunkStream


@dataclass(slots=True, eq=False)
class EngineTurn:
    """One request that is being answered."""

    asked: ScriptedRequest
    reply: Reply
    done: int = 0
    """Number of tokens sampled so far."""
    since: int = 0
    """Number of tokens that an earlier chunk had."""
    seconds: float = 0.0
    """Duration of the sampling."""
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
        """The request's id."""
        return self.asked.rid

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of its prompt."""
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
        """Return why it ended, in SGLang's format."""
        if self.aborted:
            return {"type": "abort", "message": "Aborted by request"}
        if self.reply.stops:
            return {"type": "stop", "matched": self.reply.ids[-1]}
        return {"type": "length", "length": self.done}

    def version_spans(self, version: str) -> list[dict[str, object]]:
        """Return which version sampled which tokens; `version` sampled the last of them."""
        spans: list[dict[str, object]] = []
        start = 0
        for name, end in [*self.spans, (version, self.done)]:
            if spans and spans[-1]["version"] == name:
                spans[-1]["end"] = end
            elif end > start:
                spans.append({"version": name, "start": start, "end": end})
            start = end
        return spans

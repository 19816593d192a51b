"""One request that a scripted engine is answering: how far it has come, and under which versions."""

import asyncio
from dataclasses import dataclass, field

import anyio

from rollout_service.testing.figures import ScriptedRequest
from rollout_service.testing.script import Reply


@dataclass(slots=True, eq=False)
class EngineTurn:
    """One request that is being answered."""

    asked: ScriptedRequest
    reply: Reply
    done: int = 0
    """Tokens whose time has passed."""
    seconds: float = 0.0
    """What the sampling takes."""
    elapsed: float = 0.0
    cached_tokens: int = 0
    aborted: bool = False
    ignores_pause: bool = False
    """Whether it goes on while the engine takes up nothing new."""
    before_sampling: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Ended by an abort that comes while the request is in the queue, or while its prompt is read."""
    spans: list[tuple[str, int]] = field(default_factory=list)
    """Versions and the number of tokens at which they ended."""
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rid(self) -> str:
        """The request's id."""
        return self.asked.rid

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self.asked.ids)

    @property
    def sampled(self) -> list[int]:
        """The tokens whose time has passed."""
        return list(self.reply.ids[: self.done])

    def finish_reason(self) -> dict[str, object]:
        """Why it ended, in SGLang's words."""
        if self.aborted:
            return {"type": "abort", "message": "Aborted by request"}
        if self.reply.stops:
            return {"type": "stop", "matched": self.reply.ids[-1]}
        return {"type": "length", "length": self.done}

    def version_spans(self, version: str) -> list[dict[str, object]]:
        """Which version sampled which tokens; the last of them under `version`."""
        spans: list[dict[str, object]] = []
        start = 0
        for name, end in [*self.spans, (version, self.done)]:
            if spans and spans[-1]["version"] == name:
                spans[-1]["end"] = end
            elif end > start:
                spans.append({"version": name, "start": start, "end": end})
            start = end
        return spans

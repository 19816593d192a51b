"""Answers of the policy while they are sampled, for every request that waits for them, and the limits of a rollout.

Every reader gets all events, in order, from the first one on. An answer that nobody reads is given up after
a bounded time, and no earlier: a client that repeats its request finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf

import anyio
import anyio.lowlevel

from api_schemas.rollouts import StopReason, Usage
from api_schemas.trajectories import FinishReason
from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.contract import Generation, TokenChunk
from rollout_service.episodes import EpisodeLimits
from rollout_service.gateway.capture import PlannedTurn
from rollout_service.gateway.contract import (
    AnswerBegin,
    AnswerEnd,
    AnswerEvent,
    AnswerUsage,
    CallEnd,
    ModelCall,
    TextDelta,
    TurnObserver,
)

EVENTS_AT_ONCE = 256
"""Events that are written to a client before others are served; an answer may have a hundred thousand."""


class LiveAnswer:
    def __init__(self, call: ModelCall, retry_seconds: float) -> None:
        """An answer that nobody reads is kept for `retry_seconds`."""
        self.call = call
        self.planned: PlannedTurn | None = None
        self.observer: TurnObserver | None = None
        """Keeps its turn, if the session's capture alone does not."""
        self.error: Exception | None = None
        """Why no more of it follows."""
        self.ended = False
        """All events are there."""
        self.delivered = False
        """A reader has sent the last event."""
        self.scope = anyio.CancelScope()
        """Covers the prompt, the sampling, and the wait for a reader at its end."""
        self.tool_calls = 0
        """Malformed ones included."""
        self.malformed_calls = 0
        self.events: list[AnswerEvent] = []
        self._changed = ChangeSignal()
        self._retry_seconds = retry_seconds
        self._waiting = 0
        """Requests that wait for its first event."""
        self._repeats = 0
        """Equal requests that wait for its client to go away."""
        self._readers = 0
        self._left_at = inf
        self._sampled = SampledSoFar()

    @property
    def is_read(self) -> bool:
        return self._readers > 0

    @property
    def _is_left(self) -> bool:
        """Whether its clients have gone away; they wait for it before they read it."""
        return not (self.is_read or self._waiting) and self._left_at < inf

    @property
    def is_forgotten(self) -> bool:
        """Whether it has been without a client for so long that none will come back."""
        return not self.is_read and anyio.current_time() >= self._left_at + self._retry_seconds

    @property
    def sampled_tokens(self) -> int:
        return len(self._sampled)

    @contextmanager
    def reading(self) -> Iterator[None]:
        self._readers += 1
        self.scope.deadline = inf
        self._changed.notify()
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._left_at = anyio.current_time()
                self.scope.deadline = self._left_at + self._retry_seconds
            self._changed.notify()

    # -- for the sampling ------------------------------------------------------

    def begin(self, planned: PlannedTurn, events: Sequence[AnswerEvent]) -> None:
        self.planned = planned
        self._add(events)

    def feed(self, chunk: TokenChunk) -> None:
        if self.planned is not None:
            self._sampled.add(chunk)
            if self.call.stream:  # nobody waits for parts of any other, so it is read at once when it is whole
                self._add(self.planned.feed(chunk.ids))

    def end(self, events: Sequence[AnswerEvent]) -> None:
        self.ended = True
        self.planned = None  # a long prompt, while the answer may be kept until the next call
        self._add(events)

    def fail(self, error: Exception) -> None:
        self.error = error
        self._changed.notify()

    def partial(self) -> Generation | None:
        """Return the streamed part; None if it cannot be kept exactly."""
        planned = self.planned
        return self._sampled.generation(len(planned.prompt_ids)) if planned is not None else None

    async def until_read(self) -> None:
        while not self.is_read:
            await self._changed.wait()

    # -- for readers -----------------------------------------------------------

    def deliver(self) -> None:
        """Note that the last event was sent; idempotent."""
        if not self.delivered:
            self.delivered = True
            if self.observer is not None:
                self.observer.sent()

    async def begun(self) -> None:
        """Wait until there is an event; an answer that nobody waits for any more before that does not begin.

        Raises:
            ServiceError: There will be none.
        """
        self._waiting += 1
        has_begun = False
        try:
            while not self.events:
                if self.error is not None:
                    raise self.error
                await self._changed.wait()
            has_begun = True
        finally:
            self._waiting -= 1
            if not (has_begun or self._waiting):
                self._leave()

    async def begun_again(self, seconds: float) -> bool:
        """Wait up to this long for its client to go away, and then as `begun` does; return False if it is not to be
        had: its client stays, has got all of it, or went away too long ago.

        Raises:
            ServiceError: There will be no event.
        """
        self._repeats += 1
        try:
            with anyio.move_on_after(seconds):
                while not self._is_left:
                    await self._changed.wait()
            if not self._is_left or self.delivered or self.is_forgotten:
                return False
            await self.begun()
        finally:
            self._repeats -= 1
            if self._is_left and not self.events:
                self._leave()
        return True

    def _leave(self) -> None:
        """Note that the last request which waited for an event has gone."""
        if self.events:  # one has come meanwhile
            with self.reading():
                return
        self._left_at = anyio.current_time()
        self._changed.notify()
        if not self._repeats:
            self._left_at = -inf
            self.scope.cancel()

    async def after(self, seen: int, seconds: float) -> list[AnswerEvent]:
        """Return events behind the first `seen`; none if none came in time, or `error` says why.

        Of many they are only some, and others may work before them: a whole answer takes long to write.
        """
        if len(self.events) > seen or self.error is not None:
            await anyio.lowlevel.checkpoint()
        else:
            with anyio.move_on_after(seconds):
                while len(self.events) == seen and self.error is None:
                    await self._changed.wait()
        return self.events[seen : seen + EVENTS_AT_ONCE]

    async def until_whole(self) -> None:
        while not self.ended and self.error is None:
            await self._changed.wait()

    def _add(self, events: Sequence[AnswerEvent]) -> None:
        if not events:
            return
        for event in events:
            if isinstance(event, CallEnd):
                self.tool_calls += 1
                self.malformed_calls += event.error is not None
        self.events.extend(events)
        self._changed.notify()


class SampledSoFar:
    def __init__(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._is_exact = True
        self._cached_tokens = 0

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, chunk: TokenChunk) -> None:
        self._is_exact = self._is_exact and chunk.versions is not None
        self._ids.extend(chunk.ids)
        self._logprobs.extend(chunk.logprobs)
        self._versions.extend(chunk.versions or ())
        self._cached_tokens = chunk.cached_tokens or self._cached_tokens

    def generation(self, prompt_tokens: int) -> Generation | None:
        """Return an aborted generation; None without tokens, or if a version is not known."""
        if not (self._ids and self._is_exact):
            return None
        return Generation(
            output_ids=self._ids,
            logprobs=self._logprobs,
            versions=self._versions,
            finish_reason=FinishReason.ABORT,
            prompt_tokens=prompt_tokens,
            cached_tokens=self._cached_tokens,
            backend_id="",
            engine_seconds=0.0,
        )


_TEXTS = {
    StopReason.MAX_TURNS: "The limit of turns for this task is reached.",
    StopReason.MAX_TOKENS: "The limit of tokens for this task is reached.",
}
_NOTHING = AnswerUsage(prompt_tokens=0, cached_tokens=0, sampled_tokens=0)


class TokensSpentError(Exception):
    """The calls of the rollout have used up its tokens."""


class TokenBudget:
    """The tokens that a rollout may still sample.

    Its calls never sample more together, however many are open at once, and none is cut short for tokens that another
    then does not use.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        """Neither sampled nor reserved."""
        self._reserved = 0
        self._settled = ChangeSignal()

    async def reserve(self, wanted: int) -> int:
        """Reserve as many as a call wants, or, once no other call may return some, all that are left.

        Raises:
            TokensSpentError: None are left.
        """
        while self._left < wanted and self._reserved:
            await self._settled.wait()
        if not self._left:
            raise TokensSpentError
        tokens = min(self._left, wanted)
        self._left -= tokens
        self._reserved += tokens
        return tokens

    def settle(self, reserved: int, sampled: int) -> None:
        self._reserved -= reserved
        self._left += reserved - sampled
        self._settled.notify()


def reached_limit(limits: EpisodeLimits, usage: Usage, open_calls: int) -> StopReason | None:
    """Return the limit that leaves no room beside the open calls."""
    if usage.turns + open_calls >= limits.max_turns:
        return StopReason.MAX_TURNS
    if usage.sampled_tokens >= limits.max_tokens:
        return StopReason.MAX_TOKENS
    return None


def closing_answer(call: ModelCall, reason: StopReason) -> LiveAnswer:
    """Make an answer of only a text, which is not sampled and not recorded.

    Every client takes a text without tool calls for the end of the task; an error would make many repeat the request.
    """
    answer = LiveAnswer(call, retry_seconds=0.0)
    answer.end([AnswerBegin("limit", 0), *closing_events(reason)])
    return answer


def closing_events(reason: StopReason) -> Sequence[AnswerEvent]:
    """Return what follows the beginning of an answer."""
    return [TextDelta(_TEXTS[reason]), AnswerEnd(FinishReason.STOP, _NOTHING)]

"""Parts of a gateway that a test controls: engines with scripted answers, and conversations of single characters.

A character is a token here, so the expected answers need no tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from api_schemas.trajectories import FinishReason, Trajectory
from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.contract import GenerateRequest, Generation, TokenChunk, TokenSink
from rollout_service.gateway.capture import CaptureReport
from rollout_service.gateway.contract import (
    AnswerEnd,
    AnswerEvent,
    AnswerUsage,
    ModelCall,
    TextDelta,
)
from tests.support.samples import generation

LOGPROB = -0.5


@dataclass(eq=False, slots=True)
class ManualCall:
    """One request to the engines, which goes on as the test says."""

    request: GenerateRequest
    on_tokens: TokenSink | None
    said: str = ""
    error: Exception | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)
    cancelled: bool = False

    def say(self, text: str, *, version: int = 0) -> None:
        """Sample this text."""
        self.said += text
        if self.on_tokens is not None:
            ids = [ord(character) for character in text]
            count = len(ids)
            self.on_tokens(TokenChunk(ids=ids, logprobs=[LOGPROB] * count, versions=[version] * count))

    def finish(self, text: str = "") -> None:
        """Sample this text, and end."""
        if text:
            self.say(text)
        self.ended.set()

    def fail(self, error: Exception) -> None:
        """End without an answer."""
        self.error = error
        self.ended.set()


class ManualPool:
    """Engines that a test controls; implements `gateway.sessions.sampling.StreamingGenerator`."""

    def __init__(self) -> None:
        self.calls: list[ManualCall] = []
        """All requests so far."""
        self.released: list[str] = []
        self._changed = ChangeSignal()

    async def generate(
        self, request: GenerateRequest, *, affinity: str | None = None, on_tokens: TokenSink | None = None
    ) -> Generation:
        """Wait for the test to end the request."""
        _ = affinity
        call = ManualCall(request, on_tokens)
        self.calls.append(call)
        self._changed.notify()
        try:
            await call.ended.wait()
        except anyio.get_cancelled_exc_class():
            call.cancelled = True
            self._changed.notify()
            raise
        if call.error is not None:
            raise call.error
        ids = [ord(character) for character in call.said]
        prompt_tokens = len(request.input_ids)
        return generation(ids, logprobs=[LOGPROB] * len(ids), versions=[0] * len(ids), prompt_tokens=prompt_tokens)

    def release(self, affinity: str) -> None:
        """Note that a rollout has ended."""
        self.released.append(affinity)

    async def call(self, number: int) -> ManualCall:
        """Return a request once it has arrived, counted from 0."""
        while len(self.calls) <= number:
            await self._changed.wait()
        return self.calls[number]

    async def cancelled(self, number: int) -> None:
        """Wait until a request was cancelled."""
        while not (await self.call(number)).cancelled:
            await self._changed.wait()


@dataclass(eq=False, slots=True)
class CharacterAnswer:
    """An answer whose tokens are its characters; stands in for `gateway.capture.PlannedTurn`."""

    turn_key: str
    prompt_ids: Sequence[int]
    known: int = 0
    fed: int = 0

    def feed(self, ids: Sequence[int]) -> list[AnswerEvent]:
        """Return the characters."""
        self.fed += len(ids)
        return [TextDelta("".join(map(chr, ids)))] if ids else []

    def finish(self, generation: Generation) -> list[AnswerEvent]:
        """Return the events of the ids that were not fed yet, and the end.

        Raises:
            ValueError: The generation was aborted.
        """
        if generation.finish_reason is FinishReason.ABORT:
            raise ValueError("an aborted generation is not the end of an answer")
        usage = AnswerUsage(
            prompt_tokens=generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
            sampled_tokens=len(generation.output_ids),
        )
        return [*self.complete(generation), AnswerEnd(generation.finish_reason, usage)]

    def complete(self, generation: Generation) -> list[AnswerEvent]:
        """Return the events of the ids that were not fed yet."""
        return self.feed(generation.output_ids[self.fed :])


class CharacterCapture:
    """Keeps turns without making segments of them; stands in for `gateway.capture.TurnCapture`."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str, bool]] = []
        """The text of each turn, and whether it was delivered."""

    def plan(self, call: ModelCall, context_length: int | None = None) -> CharacterAnswer:
        """Return an answer to the messages' characters."""
        _ = context_length
        text = "".join(message.text for message in call.messages)
        return CharacterAnswer(f"turn-{id(call)}", [ord(character) for character in text])

    def record(self, planned: CharacterAnswer, generation: Generation, *, delivered: bool) -> None:
        """Keep a turn."""
        _ = planned
        self.recorded.append(("".join(map(chr, generation.output_ids)), delivered))

    def trajectory(self) -> Trajectory:
        """Return a trajectory without segments."""
        reasons = [FinishReason.STOP] * len(self.recorded)
        return Trajectory(segments=[], messages=[], finish_reasons=reasons, fork_counts={})

    def report(self) -> CaptureReport:
        """Return how many turns were recorded and not delivered."""
        return CaptureReport(
            standings={},
            forks={},
            malformed_calls=0,
            undelivered=sum(not delivered for _, delivered in self.recorded),
            disagreements=0,
        )

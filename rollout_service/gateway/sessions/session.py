"""One rollout's policy, as a program of its own drives it through the gateway.

A turn is recorded before its last event can leave. A request that repeats one whose answer did not arrive is given that
answer. A call is never refused because engines are busy, paused or lost; an error that leaves one without an answer
also fails the rollout. Long prompts are made in a thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from socket import socket
from typing import NoReturn

import anyio
import structlog
from anyio.abc import TaskGroup

from api_schemas.rollouts import StopReason, Usage
from api_schemas.trajectories import Message, Trajectory
from rollout_service.activity import current_activity, current_lane, in_lane
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError, ServiceError, without_message
from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.contract import Generation
from rollout_service.engines.errors import BackendRejected, InferenceError, PromptTooLong
from rollout_service.engines.serving.session import with_turn
from rollout_service.episodes import EpisodeLimits, UndrivenPolicy
from rollout_service.gateway.bounds import in_thread
from rollout_service.gateway.capture import PlannedTurn, TurnCapture
from rollout_service.gateway.contract import AnswerBegin, AnswerEvent, CallObserver, ModelCall
from rollout_service.gateway.dialects import ListedModel
from rollout_service.gateway.errors import ContextOverflowError, RolloutEndedError
from rollout_service.gateway.metrics import CallOutcome, GatewayMetrics
from rollout_service.gateway.sessions.answer import (
    LiveAnswer,
    TokenBudget,
    TokensSpentError,
    closing_answer,
    closing_events,
    reached_limit,
)
from rollout_service.gateway.sessions.engines import PolicyEngines, masked_call
from rollout_service.tokens.errors import RecordError

log = structlog.get_logger(__name__)

INLINE_BYTES = 32 * 1024
"""Larger requests are looked up and rendered in a thread."""
INLINE_IDS = 4_096
"""Longer answers are read in a thread, which takes some microseconds for each id."""
RETRY_GRACE_SECONDS = 0.1
"""How long a request waits for the end of the connection of an equal one. If it comes, the request is a retry; if not,
it is a call of its own."""
KEY_BYTES = 32


ServeAlone = Callable[["GatewaySession", socket], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class SessionPlace:
    url: str
    model: ListedModel
    serve: ServeAlone
    tasks: TaskGroup
    metrics: GatewayMetrics
    retry_seconds: float
    """For a client that went away."""
    observer: CallObserver | None = None
    """Sees the calls and keeps their turns."""
    is_private: bool = False
    """A user talks here, of whom nothing may be in the log."""
    hidden: Collection[str] = ()
    """Masked in the policy's prompts; more may be added later."""
    charge: Callable[[int], None] = lambda _: None
    """Counts a request's further answers against its user's limit."""


class GatewaySession(UndrivenPolicy):
    """The policy of one rollout; implements `episodes.Policy` and `episodes.GatewayAccess`."""

    def __init__(
        self, capture: TurnCapture, engines: PolicyEngines, limits: EpisodeLimits, place: SessionPlace
    ) -> None:
        self.key = f"rk-{secrets.token_urlsafe(KEY_BYTES)}"
        self.url = place.url
        self.model = place.model
        self.stop_reason: StopReason | None = None
        """A limit that calls have reached."""
        self._capture = capture
        self._engines = engines
        self._limits = limits
        self._place = place
        self._capturing = anyio.Lock(fast_acquire=True)
        self._answers: dict[bytes, LiveAnswer] = {}
        """By fingerprint, until they were delivered."""
        self._open: set[LiveAnswer] = set()
        self._calls = 0
        self._call_ended = ChangeSignal()
        self._failed = ChangeSignal()
        """Separate, since ended calls would wake the episode each time."""
        self._failure: Exception | None = None
        self._ended = False
        self._reported = False
        self._usage = Usage()
        self._tokens = TokenBudget(limits.max_tokens)
        self._engine_seconds = 0.0
        self._activity = current_activity()
        """None for a live session."""
        self._lanes: set[int] = set()
        """Lanes of the calls under way, of which there may be several."""

    # -- for the program -------------------------------------------------------

    async def answer(self, call: ModelCall) -> LiveAnswer:
        """Return a new answer, or that to a repeated request, once it has begun.

        Raises:
            RolloutEndedError: The agent has ended.
            ContextOverflowError: The prompt leaves no room for an answer.
            TokenError: The messages cannot be rendered.
        """
        call = await self._without_secrets(call)
        if (repeated := await self._repeated(call)) is not None:
            self._place.metrics.count_call(call, CallOutcome.REPEATED)
            return repeated
        if self._ended:
            self._place.metrics.count_call(call, CallOutcome.REFUSED)
            raise RolloutEndedError
        reason = reached_limit(self._limits, self._usage, len(self._open))
        if reason is not None:
            self.stop_reason = self.stop_reason or reason
            self._place.metrics.count_call(call, CallOutcome.LIMIT)
            return closing_answer(call, reason)
        answer = LiveAnswer(call, self._place.retry_seconds)
        self._answers[call.fingerprint] = answer
        self._open.add(answer)
        self._place.tasks.start_soon(self._work, answer)
        await answer.begun()
        return answer

    def charge(self, answers: int) -> None:
        """Count a request's further answers.

        Raises:
            TryLaterError: The user has asked for too many.
        """
        self._place.charge(answers)

    async def count_tokens(self, call: ModelCall) -> int:
        """Count the tokens of a prompt; nothing is kept of it.

        Raises:
            ContextOverflowError: They are many more than the context holds.
            TokenError: The messages cannot be rendered.
        """
        return len((await self._plan(await self._without_secrets(call))).prompt_ids)

    async def _without_secrets(self, call: ModelCall) -> ModelCall:
        if call.size <= INLINE_BYTES or not self._place.hidden:
            return masked_call(call, self._place.hidden)
        return await in_thread(partial(masked_call, call, self._place.hidden))

    async def _repeated(self, call: ModelCall) -> LiveAnswer | None:
        """Find an answer that did not arrive whole."""
        for fingerprint, answer in list(self._answers.items()):
            if answer.delivered or answer.is_forgotten:
                del self._answers[fingerprint]
        known = self._answers.get(call.fingerprint)
        return known if known is not None and await known.begun_again(RETRY_GRACE_SECONDS) else None

    # -- sampling --------------------------------------------------------------

    async def _work(self, answer: LiveAnswer) -> None:
        outcome = CallOutcome.FAILED
        try:
            with self._in_lane():
                outcome = await self._sample(answer)
        except ContextOverflowError as error:
            outcome = CallOutcome.OVERFLOW
            answer.fail(error)
        except InvalidFieldError as error:
            outcome = CallOutcome.REFUSED
            answer.fail(error)
        except TokensSpentError:
            outcome = CallOutcome.LIMIT
            self.stop_reason = self.stop_reason or StopReason.MAX_TOKENS
            answer.end(closing_events(StopReason.MAX_TOKENS))
        except Exception as error:  # noqa: BLE001 - told to the client, and to the environment
            self._note_failure(answer.call, error)
            answer.fail(error)
        finally:
            self._place.metrics.count_call(answer.call, outcome)
            self._open.discard(answer)
            if answer.error is not None and self._answers.get(answer.call.fingerprint) is answer:
                del self._answers[answer.call.fingerprint]
            self._call_ended.notify()

    async def _sample(self, answer: LiveAnswer) -> CallOutcome:
        """Sample and record; end early once the client is gone for good or the agent has ended."""
        planned: PlannedTurn | None = None
        generation, is_read = None, False
        steps_before = 0 if self._activity is None else len(self._activity.ended)
        with answer.scope:
            planned, wanted = await self._begin(answer)
            generation = await self._generate(answer, planned, wanted)
            await answer.until_read()
            is_read = True
        if generation is None:
            generation = answer.partial()
        if planned is not None and generation is not None:
            events = await self._read(planned.finish if is_read else planned.complete, generation)
            async with self._capturing:
                if answer.observer is None:
                    self._capture.record(planned, generation, delivered=is_read)
                else:
                    await answer.observer.record(generation, delivered=is_read)
            if is_read:
                answer.end(events)
            self._note_turn(steps_before)
            self._usage = with_turn(
                self._usage, generation, tool_calls=answer.tool_calls, malformed=answer.malformed_calls
            )
        if is_read:
            return CallOutcome.ANSWERED
        answer.fail(RolloutEndedError())
        return CallOutcome.ABANDONED

    async def _read(self, read: Callable[[Generation], list[AnswerEvent]], generation: Generation) -> list[AnswerEvent]:
        """Return the events that are still to be sent."""
        is_long = len(generation.output_ids) > INLINE_IDS
        return await in_thread(read, generation) if is_long else read(generation)

    async def _begin(self, answer: LiveAnswer) -> tuple[PlannedTurn, int]:
        """Return the prompt, and the most tokens that the call asks for."""
        began = time.perf_counter()
        try:
            planned = await self._plan(answer.call)
        except ServiceError:
            if self._place.observer is not None:
                await self._place.observer.refused(answer.call)
            raise
        if self._place.observer is not None:
            answer.observer = await self._place.observer.planned(answer.call, planned)
        wanted = self._wanted(answer.call, planned)
        answer.begin(planned, [AnswerBegin(planned.turn_key, len(planned.prompt_ids))])
        self._place.metrics.observe_prompt(answer.call, planned, time.perf_counter() - began)
        return planned, wanted

    async def _plan(self, call: ModelCall) -> PlannedTurn:
        plan = partial(self._capture.plan, call, self._engines.context_length)
        async with self._capturing:
            return plan() if call.size <= INLINE_BYTES else await in_thread(plan)

    def _wanted(self, call: ModelCall, planned: PlannedTurn) -> int:
        room = self._engines.room(len(planned.prompt_ids))
        if room < 1:
            raise ContextOverflowError(len(planned.prompt_ids), self._engines.context_length)
        most = self._limits.max_turn_tokens
        return min(room, most, call.max_tokens or most)

    async def _generate(self, answer: LiveAnswer, planned: PlannedTurn, wanted: int) -> Generation:
        budget = await self._tokens.reserve(wanted)
        started, generation = time.perf_counter(), None
        try:
            generation = await self._engines.sample(answer.call, planned, budget, answer.feed)
        except PromptTooLong as error:
            raise ContextOverflowError(len(planned.prompt_ids), self._engines.context_length) from error
        finally:
            sampled = answer.sampled_tokens if generation is None else len(generation.output_ids)
            self._tokens.settle(budget, sampled)
            self._engine_seconds += time.perf_counter() - started
        return generation

    @contextmanager
    def _in_lane(self) -> Iterator[None]:
        """Work for the rollout within the block, in the first free lane."""
        if self._activity is None:
            yield
            return
        number = next(number for number in count() if number not in self._lanes)
        self._lanes.add(number)
        try:
            with self._activity.entered(), in_lane(f"model call {number + 1}" if number else ""):
                yield
        finally:
            self._lanes.discard(number)

    def _note_turn(self, steps_before: int) -> None:
        """Add the recorded turn's number to the steps of its call, which are alone in their lane."""
        if self._activity is not None:
            lane = current_lane()
            for step in self._activity.ended[steps_before:]:
                if step.lane == lane:
                    step.note(turn=self._usage.turns)

    def _note_failure(self, call: ModelCall, error: Exception) -> None:
        """Fail the rollout, unless the request itself is to blame."""
        is_infrastructure = isinstance(error, InferenceError | RecordError)
        is_requests_own = isinstance(error, BackendRejected) and call.json_schema is not None
        if self._place.is_private:
            log.warning("a call to the gateway failed", client=call.lane.client, **without_message(error))
        else:
            log.warning("a call to the gateway failed", client=call.lane.client, error=str(error), exc_info=error)
        if is_infrastructure and not is_requests_own:
            self._failure = self._failure or error
            self._failed.notify()

    # -- for the episode -------------------------------------------------------

    def refusal(self) -> EnvironmentFailedError:
        return EnvironmentFailedError(
            "a program drives this policy through the gateway, and nothing else may",
            hint="Use `Episode.gateway`, or leave `uses_gateway` false.",
        )

    @property
    def messages(self) -> list[Message]:
        return self._capture.messages()

    @property
    def usage(self) -> Usage:
        return self._usage

    @property
    def engine_seconds(self) -> float:
        """Summed over the calls, of which several may be open at once."""
        return self._engine_seconds

    def trajectory(self) -> Trajectory:
        return self._capture.trajectory()

    def serve(self, listener: socket) -> AbstractAsyncContextManager[None]:
        return self._place.serve(self, listener)

    async def until_failed(self) -> NoReturn:
        """Wait for a call that cannot be answered.

        Raises:
            InferenceError: No engine answered.
            TokenError: An answer cannot be trained on.
        """
        while self._failure is None:
            await self._failed.wait()
        raise self._failure

    @property
    def is_busy(self) -> bool:
        """Whether a request is being read, or an answer is sampled or may be asked for again."""
        return bool(self._open or self._calls)

    @contextmanager
    def called(self) -> Iterator[None]:
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def close(self) -> None:
        """Cut off the answers under way. Idempotent."""
        self._ended = True
        for answer in self._open:
            answer.scope.cancel()
        self._engines.release()

    async def end(self) -> None:
        """Close, and wait until nothing more can be recorded."""
        self.close()
        with anyio.CancelScope(shield=True):
            while self._open:
                await self._call_ended.wait()
        if not self._reported:
            self._reported = True
            self._place.metrics.count_report(self._capture.report())

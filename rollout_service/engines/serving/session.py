"""The policy under training: a conversation in token ids, connected to a pool of engines.

Sampled ids are recorded in one step without an await, so a cancellation or an error leaves only whole turns. A turn
never asks for more tokens than the context has room for. Long prompts are rendered in a thread and delay no other
rollout.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import anyio.to_thread

from api_schemas.rollouts import Sampling, TokenExtras, Usage
from api_schemas.trajectories import ForkReason, Message, Trajectory
from rollout_service.activity import noting
from rollout_service.base.masking import mask_messages
from rollout_service.engines import contract as inference
from rollout_service.engines.errors import PromptTooLong
from rollout_service.engines.pool.pool import BackendPool
from rollout_service.engines.serving.turn_log import TurnLog
from rollout_service.episodes import ContextFullError, Policy, PolicyTurn
from rollout_service.tokens import Conversation, ToolSpec

INLINE_CHARS = 4_096
"""Prompts of more characters are rendered in a thread. This leaves at most 4 ms of work on the event loop; going to a
thread and back takes 0.13 ms."""


class PolicySession:
    """One rollout's policy; implements `episodes.Policy`."""

    def __init__(
        self,
        conversation: Conversation,
        pool: BackendPool,
        *,
        affinity: str,
        sampling: Sampling,
        stop_token_ids: Sequence[int],
        context_length: int,
        exports: TokenExtras | None = None,
        turns: TurnLog | None = None,
    ) -> None:
        """`affinity` is the rollout's id; `context_length` bounds prompt and answer together, in tokens.

        `turns` has the turns to play before any is sampled, and saves the others.
        """
        self._conversation = conversation
        self._pool = pool
        self._affinity = affinity
        self._sampling = sampling
        self._stop_token_ids = tuple(stop_token_ids)
        self._context_length = context_length
        self._exports = exports or TokenExtras()
        self._turns = turns or TurnLog()
        self.usage = Usage()
        self.engine_seconds = 0.0
        """Includes calls that failed or were cancelled; played turns take none."""
        self._kept_kv: frozenset[int] = frozenset()
        self._last_sampling: inference.SamplingOptions | None = None

    async def respond(self, new_messages: list[Message], *, max_tokens: int) -> PolicyTurn:
        """Add these messages and sample one turn.

        Raises:
            CannotResumeError: The conversation differs from the turns that were to be played.
            ContextFullError: The prompt leaves no room for an answer.
            InferenceError: No engine gave an answer.
            TokenError: The messages cannot be rendered, or the answer cannot be trained on.
        """
        self._turns.give(new_messages)
        prompt = await self._prompt(new_messages)
        context = prompt[self._conversation.recorded_length() :]
        # One token is kept back because engines differ in whether the context may be filled completely.
        room = self._context_length - 1 - len(prompt)
        generation = await self._turns.next(context)
        if generation is None:
            if room < 1:
                raise self._context_full(len(prompt))
            generation = await self._generate(prompt, min(max_tokens, room))
        turn = self._conversation.record(
            generation.output_ids,
            generation.logprobs,
            generation.versions,
            generation.finish_reason,
            generation.extras if generation.extras is not inference.NOTHING_RETURNED else None,
        )
        malformed = sum([call.error is not None for call in turn.tool_calls])
        self.usage = with_turn(self.usage, generation, tool_calls=len(turn.tool_calls), malformed=malformed)
        if generation.kept_kv_versions:
            self._kept_kv |= generation.kept_kv_versions
        self._turns.record(context, generation)
        return PolicyTurn(
            message=turn.message,
            truncated=turn.truncated,
            malformed=malformed,
            context_full=turn.truncated and room <= max_tokens,
        )

    @property
    def messages(self) -> tuple[Message, ...]:
        return self._conversation.messages

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        self._conversation.offer(tools)

    def replace(self, messages: list[Message], reason: ForkReason = ForkReason.HISTORY_EDITED) -> None:
        self._turns.give(messages, reason)
        self._conversation.replace(messages, reason)

    def trajectory(self) -> Trajectory:
        trajectory = self._conversation.trajectory()
        return trajectory.model_copy(update={"kept_kv_versions": sorted(self._kept_kv)})

    async def _prompt(self, new_messages: list[Message]) -> list[int]:
        self._conversation.append(new_messages)
        if sum([len(message.content) for message in self._conversation.rendered_next]) <= INLINE_CHARS:
            return self._conversation.prompt()
        return await anyio.to_thread.run_sync(self._long_prompt)

    def _long_prompt(self) -> list[int]:
        tokens = self._conversation.count_if_over(self._context_length)
        if tokens is not None:  # rendering it would take hundreds of MB
            raise self._context_full(tokens)
        return self._conversation.prompt()

    async def _generate(self, prompt: list[int], budget: int) -> inference.Generation:
        request = inference.GenerateRequest(
            inference.new_request_id(),
            prompt,
            self._engine_sampling(budget),
            self._engine_extras(),
            self._conversation.recorded_length(),
            decode=self._conversation.decode,
        )
        started = time.perf_counter()
        try:
            with noting(turn=self.usage.turns, segment=self._conversation.next_segment()):
                return await self._pool.generate(request, affinity=self._affinity)
        except PromptTooLong as error:
            raise self._context_full(len(prompt)) from error
        finally:
            self.engine_seconds += time.perf_counter() - started

    def _engine_extras(self) -> inference.RequestedExtras:
        """Request extras from the first token that the segment lacks."""
        ordered = self._exports
        if not (ordered.top_logprobs or ordered.prompt_logprobs or ordered.routed_experts):
            return inference.NO_EXTRAS
        return inference.RequestedExtras(
            top_logprobs=ordered.top_logprobs,
            prompt_logprobs_from=self._conversation.recorded_length() if ordered.prompt_logprobs else None,
            routed_experts_from=self._conversation.routed_length() if ordered.routed_experts else None,
        )

    def _engine_sampling(self, budget: int) -> inference.SamplingOptions:
        """Return the same object from turn to turn until tokens run short."""
        if self._last_sampling is not None and self._last_sampling.max_new_tokens == budget:
            return self._last_sampling
        self._last_sampling = inference.SamplingOptions(
            max_new_tokens=budget,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k or -1,  # 0 is another common value for "all tokens"
            min_p=self._sampling.min_p,
            stop=tuple(self._sampling.stop),
            stop_token_ids=self._stop_token_ids,
            seed=self._sampling.seed,
        )
        return self._last_sampling

    def _context_full(self, prompt_tokens: int) -> ContextFullError:
        return ContextFullError(
            f"the prompt has {prompt_tokens} tokens, which leaves no room in a context of {self._context_length}",
            hint="Serve the model with a longer context, or lower `tool_output_chars` or `max_turns`.",
        )


def with_turn(usage: Usage, generation: inference.Generation, *, tool_calls: int, malformed: int) -> Usage:
    """Add a turn with so many calls, some of them malformed."""
    return Usage(
        turns=usage.turns + 1,
        prompt_tokens=usage.prompt_tokens + generation.prompt_tokens,
        cached_tokens=usage.cached_tokens + generation.cached_tokens,
        sampled_tokens=usage.sampled_tokens + len(generation.output_ids),
        tool_calls=usage.tool_calls + tool_calls,
        malformed_calls=usage.malformed_calls + malformed,
    )


def without_secrets(policy: Policy, hidden: Collection[str]) -> Policy:
    """Return the policy itself if nothing is hidden."""
    return MaskedPolicy(policy, hidden) if hidden else policy


class MaskedPolicy:
    """Masks values in the messages to a policy; implements `episodes.Policy`."""

    def __init__(self, policy: Policy, hidden: Collection[str]) -> None:
        """Values that are added to `hidden` later are masked too."""
        self._policy = policy
        self._hidden = hidden

    async def respond(self, new_messages: list[Message], *, max_tokens: int) -> PolicyTurn:
        return await self._policy.respond(mask_messages(new_messages, self._hidden), max_tokens=max_tokens)

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        self._policy.offer(tools)

    @property
    def messages(self) -> Sequence[Message]:
        return self._policy.messages

    def replace(self, messages: list[Message], reason: ForkReason = ForkReason.HISTORY_EDITED) -> None:
        self._policy.replace(mask_messages(messages, self._hidden), reason)

    @property
    def usage(self) -> Usage:
        return self._policy.usage

    @property
    def engine_seconds(self) -> float:
        return self._policy.engine_seconds

    def trajectory(self) -> Trajectory:
        return self._policy.trajectory()

"""Samples texts from pools for judges; implements `judging.contract.TextSampler`.

Prompts go to the engines as ids of the model's own chat format, in which no text of a message becomes a control token.
Long prompts are rendered in a thread. Nothing is recorded for training.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio.to_thread

from api_schemas.trajectories import FinishReason, Message
from rollout_service.engines.contract import GenerateRequest, SamplingOptions, new_request_id
from rollout_service.engines.serving.policies import PolicyServing, PoolModel
from rollout_service.engines.serving.session import INLINE_CHARS
from rollout_service.episodes import ContextFullError
from rollout_service.judging.contract import SampledText


class PoolTextSampler:
    def __init__(self, serving: PolicyServing) -> None:
        self._serving = serving

    def model(self, pool: str) -> str:
        """Name the model and its newest version.

        Raises:
            NoBackendError: The pool is not served.
        """
        _, backends = self._serving.connect(pool)
        views = backends.views()
        newest = max((view.weight_version for view in views), default=0)
        return f"{next((view.model_path for view in views), pool)}@{newest}"

    async def sample(
        self, pool: str, messages: Sequence[Message], *, max_tokens: int, temperature: float
    ) -> SampledText:
        """Sample one answer.

        Raises:
            ContextFullError: The prompt leaves no room for an answer.
            InferenceError: No engine answered.
            TokenError: The messages cannot be turned into ids.
        """
        served, backends = self._serving.connect(pool)
        prompt = await _render(served, messages)
        room = served.context_length - 1 - len(prompt)
        if room < 1:
            raise ContextFullError(
                f"the prompt for the pool {pool!r} has {len(prompt)} tokens, which leaves no room in its context of "
                f"{served.context_length}",
                hint="Serve it with a longer context, or lower `max_chars` of a judge's rubric.",
            )
        sampling = SamplingOptions(
            max_new_tokens=min(max_tokens, room),
            temperature=temperature,
            stop_token_ids=served.renderer.stop_token_ids,
        )
        generation = await backends.generate(GenerateRequest(new_request_id(), prompt, sampling))
        return SampledText(
            text=served.renderer.parse(generation.output_ids, prompt).content,
            truncated=generation.finish_reason is FinishReason.LENGTH,
            prompt_tokens=generation.prompt_tokens,
            sampled_tokens=len(generation.output_ids),
        )


async def _render(served: PoolModel, messages: Sequence[Message]) -> list[int]:
    if sum(len(message.content) for message in messages) <= INLINE_CHARS:
        return served.renderer.render(messages)
    return await anyio.to_thread.run_sync(served.renderer.render, messages)

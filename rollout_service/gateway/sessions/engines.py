"""The engines behind a session, and a call without secrets.

Sampling is the run's; the client's parameters count only if the settings say so, and then within the run's
limits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Protocol

import orjson
from pydantic import JsonValue

from api_schemas.rollouts import Sampling, TokenExtras
from rollout_service.base.masking import mask, mask_texts
from rollout_service.engines import contract as inference
from rollout_service.gateway.capture import PlannedTurn
from rollout_service.gateway.contract import ClientMessage, ModelCall

UNSTREAMED_CHUNK = 32
"""Tokens of a chunk that no client waits for: few enough that little is sampled again if the engine is lost."""
_OBEYED = {"temperature": (0.0, 100.0), "top_p": (1e-6, 1.0), "top_k": (-1, 2**31 - 1), "min_p": (0.0, 1.0)}
"""Parameters that a client may change, with the values that engines accept."""


class StreamingGenerator(Protocol):
    """Implemented by `engines.pool.BackendPool`."""

    async def generate(
        self,
        request: inference.GenerateRequest,
        *,
        affinity: str | None = None,
        on_tokens: inference.TokenSink | None = None,
    ) -> inference.Generation: ...

    def release(self, affinity: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PolicyEngines:
    """The engines of one rollout's policy, and how they sample."""

    pool: StreamingGenerator
    affinity: str | None
    """None for calls that have nothing to do with each other."""
    context_length: int
    """Tokens of prompt and answer together."""
    stop_token_ids: Sequence[int]
    sampling: Sampling
    exports: TokenExtras
    obey_sampling: bool = False
    cache_salt: str = ""
    """Keeps cached prefixes apart from those of requests with another one."""
    decode: Callable[[Sequence[int]], str] | None = None
    """For stop strings that an interruption has cut."""

    def room(self, prompt_tokens: int) -> int:
        """Return the tokens left for an answer; below 1 if there is no room."""
        return self.context_length - 1 - prompt_tokens  # engines differ in whether the context may be filled

    async def sample(
        self, call: ModelCall, planned: PlannedTurn, budget: int, on_tokens: inference.TokenSink
    ) -> inference.Generation:
        """Sample an answer of at most `budget` tokens.

        Raises:
            InferenceError: No engine answered.
        """
        request = inference.GenerateRequest(
            inference.new_request_id(),
            planned.prompt_ids,
            self._options(call, budget),
            self._extras(planned),
            planned.known,
            chunk_tokens=1 if call.stream else UNSTREAMED_CHUNK,
            cache_salt=self.cache_salt,
            decode=self.decode,
        )
        return await self.pool.generate(request, affinity=self.affinity, on_tokens=on_tokens)

    def release(self) -> None:
        """Free the place on the engine; idempotent."""
        if self.affinity is not None:
            self.pool.release(self.affinity)

    def _options(self, call: ModelCall, budget: int) -> inference.SamplingOptions:
        run = self.sampling
        options: dict[str, Any] = {
            "temperature": run.temperature,
            "top_p": run.top_p,
            "top_k": run.top_k or -1,  # 0 is another common value for "all tokens"
            "min_p": run.min_p,
        }
        if self.obey_sampling:
            options |= _usable(call.requested)
        return inference.SamplingOptions(
            max_new_tokens=budget,
            stop=(*run.stop, *call.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            seed=_seed_of(run.seed, call.sibling),
            json_schema=orjson.dumps(call.json_schema).decode() if call.json_schema is not None else None,
            **options,
        )

    def _extras(self, planned: PlannedTurn) -> inference.RequestedExtras:
        ordered = self.exports
        if not (ordered.top_logprobs or ordered.prompt_logprobs):
            return inference.NO_EXTRAS
        return inference.RequestedExtras(
            top_logprobs=ordered.top_logprobs,
            prompt_logprobs_from=planned.known if ordered.prompt_logprobs else None,
        )


def _seed_of(seed: int | None, sibling: int) -> int | None:
    """Return an answer's own seed, since with one seed all answers to a request would be the same."""
    if seed is None or sibling == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed}/{sibling}".encode(), digest_size=4).digest()) >> 1


def _usable(requested: Mapping[str, JsonValue]) -> dict[str, float]:
    """Keep parameters that engines know, with values that they accept."""
    usable: dict[str, float] = {}
    for name, (least, most) in _OBEYED.items():
        value = requested.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            usable[name] = int(value) or -1 if name == "top_k" else value
    return usable


def masked_call(call: ModelCall, hidden: Collection[str]) -> ModelCall:
    """Return the same call if nothing is hidden.

    The policy's own answers come back as it wrote them, unless it wrote such a value by itself.
    """
    if not hidden:
        return call
    return replace(
        call,
        messages=tuple(_masked(message, hidden) for message in call.messages),
        tools=mask_texts(call.tools, hidden),
        deferred_tools=mask_texts(call.deferred_tools, hidden),
    )


def _masked(message: ClientMessage, hidden: Collection[str]) -> ClientMessage:
    calls = tuple(replace(one, arguments=mask(one.arguments, hidden)) for one in message.calls)
    reasoning = mask_texts(message.reasoning, hidden)
    return message._replace(text=mask(message.text, hidden), reasoning=reasoning, calls=calls)

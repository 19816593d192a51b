"""The contract of an inference engine: prompt ids in, sampled ids with logprobs and versions out.

Guarantees of every `Backend`:

- `Generation.output_ids`, `logprobs` and `versions` have equal lengths and come from the engine, element by
  element; an answer that breaks this is a `BackendProtocolError`, never padded.
- Weight versions are integers. An engine that was never told one is at version 0.
- Request ids have a fixed length, so none is a prefix of another: engines abort by prefix.
- The chunks that a `TokenSink` is given, joined, are at every moment a prefix of the answer's `output_ids`, and equal
  to them once `generate` returns. An answer that breaks off has delivered no token that could be its last.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from api_schemas.inference import PauseMode
from api_schemas.trajectories import FinishReason

_REQUEST_ID = re.compile(r"[0-9a-f]{32}(-\d{4})?")


def new_request_id() -> str:
    return os.urandom(16).hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Every field is sent, because an engine's own defaults (such as a model's top_k of 50) would change the
    distribution that the logprobs are taken from.
    """

    max_new_tokens: int = 1024
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 is the whole vocabulary."""
    min_p: float = 0.0
    stop: Sequence[str] = ()
    """Texts after which to stop; the tokens that spell them are kept."""
    stop_token_ids: Sequence[int] = ()
    """Ids after which to stop, in addition to the model's end-of-sequence ids; the id is kept."""
    seed: int | None = None
    json_schema: str | None = None
    """A JSON schema, as JSON, that the sampled text must match. Logprobs are then those of the engine's constrained
    distribution, and the text is sampled as a whole: an interrupted request begins anew."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"top_k must be at least 1, or -1 for all, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedExtras:
    top_logprobs: int = 0
    """How many of the likeliest tokens to return for each sampled one."""
    prompt_logprobs_from: int | None = None
    """The index of the first prompt token whose logprob to return; None for no prompt logprobs."""
    routed_experts_from: int | None = None
    """The index of the first token, of prompt and output, whose experts to return; None for no experts."""

    def __post_init__(self) -> None:
        if self.top_logprobs < 0:
            raise ValueError(f"top_logprobs must not be negative, got {self.top_logprobs}")
        if min(self.prompt_logprobs_from or 0, self.routed_experts_from or 0) < 0:
            raise ValueError("a token's index must not be negative")


NO_EXTRAS = RequestedExtras()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`request_id` is from `new_request_id`; the pool appends the attempt (`-0001`) for the engine."""

    request_id: str
    input_ids: Sequence[int]
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    extras: RequestedExtras = NO_EXTRAS
    known: int = 0
    """How many of the first ids were sent or sampled in an earlier turn, and checked then."""
    chunk_tokens: int = 1
    """How many tokens a chunk of a streamed answer may wait for; engines that cannot be told send smaller ones."""
    cache_salt: str = ""
    """Requests with different ones share no cached prefix, on engines that can keep them apart."""
    traceparent: str | None = None
    """The header with the span that an engine which exports traces is to continue."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Returns the text of ids. With it, stop strings are found also where an interruption has cut them."""

    def __post_init__(self) -> None:
        if not _REQUEST_ID.fullmatch(self.request_id):
            raise ValueError(f"request id {self.request_id!r} is not from new_request_id()")
        if not self.input_ids:
            raise ValueError("input_ids must not be empty")
        extras = self.extras
        first = max(extras.prompt_logprobs_from or 0, extras.routed_experts_from or 0)
        if first > len(self.input_ids):
            raise ValueError(f"the prompt has {len(self.input_ids)} tokens, but extras begin at {first}")


class TopLogprob(NamedTuple):
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedExtras:
    """The extras that were requested; a field is None if it was not requested, or if nothing was sampled."""

    top_logprobs: list[list[TopLogprob]] | None = None
    """The likeliest tokens for each sampled one, best first, under the distribution of `logprobs`."""
    prompt_logprobs: list[float | None] | None = None
    """The log-probabilities of the prompt's tokens from `prompt_logprobs_from` on, at temperature 1, each given all
    tokens before it; None for the first token of a prompt. They are of the first sampled token's version."""
    routed_experts: NDArray[np.int32] | None = None
    """`[tokens, layers, experts per token]`: which experts read each token of prompt and output, from
    `routed_experts_from` on. The last sampled token has not been read and has no row."""


NOTHING_RETURNED = ReturnedExtras()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Newly sampled tokens of a request that is still being answered, with one entry per token in every list."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int] | None
    """None if the engine reports them only with the whole answer."""
    top_logprobs: list[list[TopLogprob]] | None = None
    """As in `ReturnedExtras`."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV the engine already held; None if it reports that only with the whole answer."""


TokenSink = Callable[[TokenChunk], None]
"""Called with each chunk on the event loop, as it arrives; must be quick and must not raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to a request, with one entry per sampled token in `output_ids`, `logprobs` and `versions`."""

    output_ids: list[int]
    logprobs: list[float]
    """Natural logarithm of each sampled token's probability under the temperature-scaled distribution, before
    top_k, top_p and min_p; of greedy sampling, under that at temperature 1."""
    versions: list[int]
    """The weight version that sampled each token."""
    finish_reason: FinishReason
    matched: int | str | None = None
    """The id or text that ended a `stop`, if the engine reports it."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV the engine already held, at the first attempt."""
    kept_kv_versions: frozenset[int] = frozenset()
    """Those of `versions` whose tokens may attend to KV that older weights computed; a single backend's answer leaves
    it empty."""
    backend_id: str
    """The backend that served the last attempt."""
    engine_seconds: float
    """Spent waiting for engines, summed over the attempts."""
    extras: ReturnedExtras = NOTHING_RETURNED


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    model_path: str
    tokenizer_path: str
    weight_version: int
    vocab_size: int | None
    """None if the engine does not report it and its model folder is not readable from here."""
    context_length: int
    routing_shape: tuple[int, int] | None = None
    """Layers and experts per token of a mixture of experts; None for other models, or if the model folder is not
    readable from here."""
    extras: frozenset[str] = frozenset()
    """The extras that it returned when it was checked at registration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLoad:
    running: int
    waiting: int
    used_tokens: int
    waiting_tokens: int | None = None
    """Prompt tokens in its queue that are not read yet; None if it does not report them."""
    capacity_tokens: int | None = None
    """KV tokens that it has room for; None if it does not report them."""
    signature: str = ""
    """The whole report; two equal texts mean that nothing changed in between."""


class Backend(Protocol):
    """Every method may raise `BackendUnreachable`, `BackendRejected` or `BackendProtocolError`."""

    @property
    def id(self) -> str:
        """Unique among the backends of the service."""

    @property
    def url(self) -> str: ...

    @property
    def keeps_kv_apart(self) -> bool:
        """Whether a request can find only KV of the weights that the engine has when it is sent."""

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        """Sample one continuation; after an abort in the engine, return the tokens sampled so far.

        With `on_tokens`, the engine streams, and each chunk is delivered before this call returns the whole. A request
        for prompt logprobs or with a JSON schema is delivered as one chunk. Cancelling this call aborts the request in
        the engine, and nothing is delivered afterwards.

        Raises:
            PromptTooLong: Prompt and budget do not fit the context.
            GenerationTimeout: The engine did not answer within the time limit; the request was aborted.
        """

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all for None; their `generate` calls return the tokens sampled so far."""

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """Stop sampling; requests that arrive now wait in the engine.

        After `abort`, the open calls have returned the tokens that they had. `drain` is the pool's task and never
        passed here.
        """

    async def resume(self) -> None:
        """Resume sampling; does nothing if the engine is not paused."""

    async def update_weights(self, path: str, version: int, *, flush_cache: bool = True) -> None:
        """Load the weights in the folder `path`, which the engine must be able to read, as `version`.

        Without a pause, the engine first finishes its running requests. With `flush_cache=False`, KV of the old weights
        stays in use; this is required while an `in_place` pause holds running requests.
        """

    async def model_info(self) -> ModelInfo: ...

    async def health(self, *, paused: bool = False) -> None:
        """Check that the engine serves; a paused one only has to answer."""

    async def load(self) -> BackendLoad: ...

    async def close(self) -> None:
        """Close the connections; the engine itself keeps running."""

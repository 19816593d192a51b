"""A stand-in for vLLM's `AsyncLLMEngine`, and for the part of vLLM that serving one imports."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import anyio
import pytest

from rollout_client.adapters.engine_server import EngineServer
from tests.support.adapters.modules import modules

LOGPROB = -0.5
"""The logprob of every sampled token."""


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1


class VLLMValidationError(Exception):
    """vLLM refuses a request."""


@dataclass(kw_only=True)
class SamplingParams:
    """vLLM's sampling parameters, as far as they are used; greedy ones restrict nothing, as with vLLM's own."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    logprobs: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise VLLMValidationError("temperature must be non-negative")
        if self.temperature == 0:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the stand-ins for vLLM's modules."""
    modules(monkeypatch, "vllm", SamplingParams=SamplingParams)
    modules(monkeypatch, "vllm.sampling_params", RequestOutputKind=RequestOutputKind)
    modules(monkeypatch, "vllm.exceptions", VLLMValidationError=VLLMValidationError)


@dataclass(frozen=True)
class Logprob:
    logprob: float


@dataclass(frozen=True)
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    model: str = "some/model"
    tokenizer: str = "some/tokenizer"
    max_model_len: int = 2048
    logprobs_mode: str = "processed_logprobs"
    vocab_size: int = 512

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True)
class CacheConfig:
    num_gpu_blocks: int = 10
    block_size: int = 16


@dataclass(frozen=True)
class VllmConfig:
    cache_config: CacheConfig = CacheConfig()


class FakeEngine:
    """Samples these tokens for every request, as far as its budget goes; without `ends`, it then waits for an abort."""

    def __init__(
        self, tokens: Iterable[int] = (7, 8, 9), model: ModelConfig | None = None, *, ends: bool = True
    ) -> None:
        self.model_config = model or ModelConfig()
        self.vllm_config = VllmConfig()
        self.tokens = list(tokens)
        self.ends = ends
        self.may_begin = anyio.Event()
        """Until it is set, requests are on their way into the engine, where an abort does not find them."""
        self.may_begin.set()
        self.error: Exception | None = None
        self.asked: list[tuple[dict[str, Any], SamplingParams, str]] = []
        self.orders: list[Any] = []
        self.unfinished: dict[str, anyio.Event] = {}

    async def generate(
        self, prompt: dict[str, Any], sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        self.asked.append((prompt, sampling_params, request_id))
        if self.error is not None:
            raise self.error
        await self.may_begin.wait()
        aborted = self.unfinished[request_id] = anyio.Event()
        tokens = self.tokens[: sampling_params.max_tokens]
        cached = min(2, len(prompt["prompt_token_ids"]))
        for token in tokens:
            entry = {token: Logprob(LOGPROB), 1: Logprob(-2.0)}
            yield RequestOutput([CompletionOutput([token], [entry])], cached)
        if not self.ends:
            await aborted.wait()
        self.unfinished.pop(request_id, None)
        reason = ("stop" if len(tokens) < sampling_params.max_tokens else "length") if self.ends else "abort"
        yield RequestOutput([CompletionOutput([], [], reason, None)], cached)

    async def abort(self, request_id: str | list[str]) -> None:
        rids = [request_id] if isinstance(request_id, str) else request_id
        self.orders += [("abort", rid) for rid in rids]
        for rid in rids:
            if rid in self.unfinished:
                self.unfinished.pop(rid).set()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.orders.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        self.orders.append("resume")

    async def check_health(self) -> None:
        if self.error is not None:
            raise self.error

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple = ()) -> list[str]:
        self.orders.append((method, *args))
        return ["done"]


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[tuple[EngineServer, str]]:
    """Serve the engine while the context lasts; yield the server and the engine's address."""
    server = EngineServer(engine)
    address = await server.start("127.0.0.1")
    try:
        yield server, address
    finally:
        await stop(server)


async def stop(server: EngineServer) -> None:
    """Stop listening."""
    server._http.should_exit = True
    await server._http.shutdown()

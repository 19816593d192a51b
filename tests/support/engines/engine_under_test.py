"""An engine that the contract suite tests, and ways to interrupt what it samples while it samples it."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from tokenizers import Tokenizer

from api_schemas.inference import PauseMode
from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import (
    Backend,
    GenerateRequest,
    Generation,
    ModelInfo,
    RequestedExtras,
    SamplingOptions,
    new_request_id,
)
from rollout_service.engines.kinds.vllm.backend import VllmBackend
from tests.support.waiting import collect

LONG = 1_200
"""Tokens of a request that is interrupted."""
ATTEMPTS = 20
"""Attempts to interrupt a request: on a busy machine the test may go on only after the last token."""


# vLLM takes a minute to start, and several on a busy machine.
ON_SGLANG = pytest.param(
    "sglang", id="sglang", marks=[pytest.mark.sglang, pytest.mark.xdist_group("sglang"), pytest.mark.timeout(480)]
)
ON_VLLM = pytest.param(
    "vllm", id="vllm", marks=[pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(480)]
)


@dataclass(frozen=True)
class Checkpoints:
    """Two models of one shape."""

    first: Path
    second: Path


@dataclass(frozen=True)
class EngineUnderTest:
    """A backend, and the model that it serves at the start of a test."""

    backend: Backend
    checkpoints: Checkpoints
    info: ModelInfo
    cache_block: int
    """Number of tokens that its prefix cache keeps or drops together."""

    @property
    def renormalizes(self) -> bool:
        """Whether logprobs are renormalized over what top_p leaves; requests with top_p are then refused."""
        return isinstance(self.backend, VllmBackend)

    def request(self, prompt: Sequence[int], extras: RequestedExtras | None = None, **sampling: Any) -> GenerateRequest:
        """Return a request, greedy unless told otherwise."""
        settings = SamplingOptions(**{"temperature": 0.0, **sampling})
        return GenerateRequest(new_request_id(), prompt, settings, extras or RequestedExtras())

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids, without special tokens."""
        tokenizer = Tokenizer.from_file(str(self.checkpoints.first / "tokenizer.json"))
        return str(tokenizer.decode(list(ids)))

    def cached(self, tokens: int) -> int:
        """Return how many of the tokens that it has read it can have kept."""
        return tokens // self.cache_block * self.cache_block

    async def generate(
        self, prompt: Sequence[int], extras: RequestedExtras | None = None, **sampling: Any
    ) -> Generation:
        return await self.backend.generate(self.request(prompt, extras, **sampling))

    @asynccontextmanager
    async def running(self, request: GenerateRequest) -> AsyncIterator[list[Generation]]:
        """Run the body while the request is sampled; afterwards the yielded list has its result."""
        await until_idle(self.backend)  # so that what runs is this request, and not one that was aborted
        result: list[Generation] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, result, lambda: self.backend.generate(request))
            while not result and not (await self.backend.load()).running:
                await anyio.sleep(0.01)
            yield result

    async def interrupt(self, make_request: Callable[[], GenerateRequest]) -> Generation:
        """Abort a request while it runs and return its answer; fail if no attempt was in time."""
        for _ in range(ATTEMPTS):
            request = make_request()
            async with self.running(request) as result:
                await self.backend.abort(request.request_id)
            if result[0].finish_reason is FinishReason.ABORT:
                return result[0]
            assert len(result[0].output_ids) == request.sampling.max_new_tokens
        pytest.fail(f"{ATTEMPTS} requests ended as if none had been aborted")

    @asynccontextmanager
    async def paused(self, mode: PauseMode, prompt: Sequence[int]) -> AsyncIterator[list[Generation]]:
        """Run the body while a pause holds a long request; afterwards the yielded list has its result.

        A pause that aborts the request has put the result into the list already. Fail if no pause was in time.
        """
        for _ in range(ATTEMPTS):
            async with self.running(self.request(prompt, max_new_tokens=LONG)) as result:
                await self.backend.pause(mode)
                in_time = not result or result[0].finish_reason is FinishReason.ABORT
                if in_time:
                    yield result
                await self.backend.resume()
            if in_time:
                return
        pytest.fail(f"{ATTEMPTS} requests ended before their pause")


async def until_idle(backend: Backend) -> None:
    """Wait until the engine reports no request; it may report an aborted one until its next step."""
    with anyio.fail_after(60):
        while (load := await backend.load()).running or load.waiting:
            await anyio.sleep(0.01)

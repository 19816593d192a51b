"""Pools of scripted engines that are reached over real HTTP, requests to them, and their right answers."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from api_schemas.inference import BackendState
from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import (
    GenerateRequest,
    Generation,
    RequestedExtras,
    SamplingOptions,
    new_request_id,
)
from rollout_service.engines.kinds.sglang.backend import SGLangBackend
from rollout_service.engines.pool.pool import BackendPool
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Counting, ScriptedEngine

SCRIPT = Counting()
POLICY = policy_folder("calc-tuned")
OPTIONS = PoolOptions(
    hold_seconds=20.0, probe_interval=0.05, probe_timeout=2.0, slow_start=0.0, registration_timeout=5.0
)


def request(
    budget: int = 12,
    prompt: Sequence[int] = (1, 2, 3),
    extras: RequestedExtras | None = None,
    **sampling: Any,
) -> GenerateRequest:
    options = SamplingOptions(max_new_tokens=budget, **sampling)
    return GenerateRequest(new_request_id(), prompt, options, extras or RequestedExtras())


def is_exact(generation: Generation, budget: int = 12, prompt: Sequence[int] = (1, 2, 3)) -> bool:
    """Return whether this is the generation of an uninterrupted script that depends only on positions."""
    return (
        generation.output_ids == [SCRIPT.token_at(len(prompt) + i) for i in range(budget)]
        and len(generation.logprobs) == len(generation.versions) == budget
        and generation.finish_reason is FinishReason.LENGTH
    )


def policy_engine() -> ScriptedEngine:
    """Return an engine with the vocabulary of a shipped policy, whose tokenizer can be loaded."""
    return ScriptedEngine(Counting(512), model_path=POLICY, vocab_size=512)


@asynccontextmanager
async def running(
    *engines: ScriptedEngine, options: PoolOptions = OPTIONS, limits: Sequence[int | None] = ()
) -> AsyncIterator[tuple[Pools, BackendPool]]:
    """Yield pools with these engines in the pool `policy`, and that pool."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        pools = await stack.enter_async_context(Pools(options))
        for engine, limit in zip(engines, limits or [None] * len(engines), strict=True):
            await pools.register(engine.url, max_in_flight=limit)
        yield pools, pools["policy"]


@asynccontextmanager
async def answering(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[SGLangBackend]:
    """Yield a backend whose engine answers every request by this function."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    backend = SGLangBackend(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield backend
    finally:
        await backend.close()
        await runner.cleanup()


def states(pool: BackendPool) -> list[BackendState]:
    return [view.state for view in pool.views()]


def weights_in(folder: Path) -> str:
    """Make a folder pass for one with weights, which the backend for vLLM looks for."""
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return str(folder)

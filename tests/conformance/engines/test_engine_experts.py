"""Real SGLang reports the experts that transformers routes to, across turns and interruptions."""

from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np
import pytest

from rollout_service.engines.contract import (
    GenerateRequest,
    RequestedExtras,
    SamplingOptions,
    new_request_id,
)
from rollout_service.engines.kinds.sglang.backend import SGLangBackend
from rollout_service.engines.local_servers.cpu_server import DEFAULT_ENVIRONMENT, SGLangCpuServer
from rollout_service.engines.pool.backend_handle import check_backend
from rollout_service.engines.pool.continuation import Continuation
from rollout_service.testing import Shape, write_random_checkpoint
from tests.support.engines.with_transformers import ask_transformers

pytestmark = [
    pytest.mark.extended("rollout_service/engines/", "rollout_service/tokens/"),
    pytest.mark.anyio,
    pytest.mark.sglang,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.timeout(400),
]

MIXTURE = Shape(layers=3, intermediate=64, experts=8, experts_per_token=2)
PROMPT = [(7 * i + 11) % 256 for i in range(40)]
LONG = 300
INTERRUPTIONS = 5  # attempts: on a busy machine the abort may come after the last token


def routed_by_transformers(model, ids):
    order = {"model": str(model), "ids": ids}
    return np.array(ask_transformers(DEFAULT_ENVIRONMENT, "route_experts.py", order))


def request(prompt, first, budget):
    sampling = SamplingOptions(max_new_tokens=budget, temperature=0.0)
    return GenerateRequest(new_request_id(), prompt, sampling, RequestedExtras(routed_experts_from=first))


async def interrupted(backend, asked):
    """Return the answer to a request that is aborted once while it runs; fail if no attempt was in time."""
    for _ in range(INTERRUPTIONS):
        continuation, parts = Continuation(asked), []
        first = continuation.next_request()

        async def generate(first=first, parts=parts):
            parts.append(await backend.generate(first))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            while not parts and not (await backend.load()).running:
                await anyio.sleep(0.01)
            await backend.abort(first.request_id)
        if continuation.add(parts[0]) is None:
            return continuation.add(await backend.generate(continuation.next_request()))
    pytest.fail("every request ended before its abort")


@asynccontextmanager
async def closing(url):
    backend = SGLangBackend(url)
    yield backend
    await backend.close()


async def test_the_experts_are_those_that_transformers_routes_to(tmp_path):
    model = write_random_checkpoint(tmp_path / "model", MIXTURE, seed=4, dtype="F32")
    async with SGLangCpuServer(model, routed_experts=True) as server, closing(server.url) as backend:
        info = await check_backend(backend, seconds=60)
        assert (info.routing_shape, "routed_experts" in info.extras) == ((3, 2), True)
        first = await interrupted(backend, request(PROMPT, 0, LONG))
        first_turn = [*PROMPT, *first.output_ids]
        second = await backend.generate(request([*first_turn, 5, 6], len(first_turn) - 1, 8))
    ids = [*first_turn, 5, 6, *second.output_ids]
    experts = np.concatenate([first.extras.routed_experts, second.extras.routed_experts])
    expected = await anyio.to_thread.run_sync(routed_by_transformers, model, ids)
    np.testing.assert_array_equal(np.sort(experts, axis=-1), expected[:-1])

"""With the same weights the embedded engine, SGLang and transformers give every token the same logprob."""

from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import pytest

from rollout_service.engines.contract import SamplingOptions
from rollout_service.engines.kinds.sglang.backend import SGLangBackend
from rollout_service.engines.local_servers.cpu_server import DEFAULT_ENVIRONMENT
from tests.support.engines.with_transformers import (
    generate_together,
    largest_difference,
    recompute,
    some_requests,
    temperature_of,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.sglang,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.timeout(480),
    pytest.mark.slow(seconds=400),
]

POLICIES = Path(__file__).parents[3] / "rollout_service" / "engines" / "checkpoints"
ENGINES_TOLERANCE = 1e-4
TRANSFORMERS_TOLERANCE = 1e-4
SAMPLINGS = [
    SamplingOptions(max_new_tokens=24, temperature=1.0),
    SamplingOptions(max_new_tokens=24, temperature=0.6),
    SamplingOptions(max_new_tokens=24, temperature=1.3, top_p=0.9, top_k=20),
    SamplingOptions(max_new_tokens=24, temperature=0.0),
]


async def score_with_sglang(url, request, generation):
    """Return SGLang's logprobs, at temperature 1, of tokens that another engine sampled."""
    body = {
        "input_ids": [*request.input_ids, *generation.output_ids],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": len(request.input_ids) - 1,
    }
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as answer:
        entries = (await answer.json())["meta_info"]["input_token_logprobs"]
    return [logprob for logprob, _, _ in entries[1:]]


@pytest.fixture(params=["random", "calc-base", "calc-tuned"])
def model(request, checkpoints):
    return checkpoints.second if request.param == "random" else POLICIES / request.param


@asynccontextmanager
async def serving(model, *urls):
    """Yield backends of these engines, with the model loaded."""
    backends = [SGLangBackend(url) for url in urls]
    for backend in backends:
        await backend.update_weights(str(model), 1)
    yield backends
    for backend in backends:
        await backend.close()


async def test_transformers_gives_every_sampled_token_the_same_logprob(model, embedded_url, sglang_url):
    requests, generations = [], []
    async with serving(model, embedded_url, sglang_url) as backends:
        for seed, backend in enumerate(backends):
            asked = some_requests(seed, SAMPLINGS)
            requests += asked
            generations += await generate_together(backend, asked)
    recomputed = await anyio.to_thread.run_sync(recompute, DEFAULT_ENVIRONMENT, model, requests, generations)
    for generation, logprobs in zip(generations, recomputed, strict=True):
        assert largest_difference(generation.logprobs, logprobs) < TRANSFORMERS_TOLERANCE


async def test_sglang_gives_the_embedded_engines_tokens_the_same_logprob(model, embedded_url, sglang_url):
    requests = [each for each in some_requests(5, SAMPLINGS) if temperature_of(each) == 1.0]
    async with serving(model, embedded_url, sglang_url) as (embedded, _):
        for request, generation in zip(requests, await generate_together(embedded, requests), strict=True):
            scored = await score_with_sglang(sglang_url, request, generation)
            assert largest_difference(generation.logprobs, scored) < ENGINES_TOLERANCE


async def test_both_engines_take_the_same_greedy_path(model, embedded_url, sglang_url):
    requests = [each for each in some_requests(6, SAMPLINGS) if each.sampling.temperature == 0.0]
    async with serving(model, embedded_url, sglang_url) as backends:
        ours, theirs = [await generate_together(backend, requests) for backend in backends]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.output_ids == other.output_ids
        assert mine.matched == other.matched
        assert largest_difference(mine.logprobs, other.logprobs) < ENGINES_TOLERANCE

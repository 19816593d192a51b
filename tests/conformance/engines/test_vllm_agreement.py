"""With the same weights vLLM and transformers give every token the same logprob, across an update in place too."""

import anyio
import anyio.to_thread
import pytest

from api_schemas.inference import PauseMode
from rollout_service.engines.contract import GenerateRequest, SamplingOptions, new_request_id
from rollout_service.engines.errors import BackendRejected
from rollout_service.engines.kinds.vllm.backend import VllmBackend
from tests.support.engines.with_transformers import generate_together, recompute, some_requests
from tests.support.vllm_cpu import DEFAULT_ENVIRONMENT
from tests.support.waiting import collect

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(480),
    pytest.mark.slow(seconds=220),
]

TOLERANCE = 1e-4
SAMPLINGS = [SamplingOptions(max_new_tokens=24, temperature=each) for each in (1.0, 0.6, 1.3, 0.0)]


def largest_difference(left, right):
    assert len(left) == len(right)
    return max((abs(a - b) for a, b in zip(left, right, strict=True)), default=0.0)


@pytest.fixture
async def backend(vllm_url, anyio_backend):
    backend = VllmBackend(vllm_url)
    await backend.resume()
    yield backend
    await backend.close()


@pytest.mark.parametrize("name", ["first", "second"])
async def test_transformers_gives_every_sampled_token_the_same_logprob(backend, untied_checkpoints, name):
    model = getattr(untied_checkpoints, name)
    await backend.update_weights(str(model), 1)
    requests = some_requests(7, SAMPLINGS)
    generations = await generate_together(backend, requests)
    recomputed = await anyio.to_thread.run_sync(recompute, DEFAULT_ENVIRONMENT, model, requests, generations)
    for generation, logprobs in zip(generations, recomputed, strict=True):
        assert largest_difference(generation.logprobs, logprobs) < TOLERANCE


async def test_weights_that_would_be_loaded_in_part_are_refused(backend, checkpoints):
    with pytest.raises(BackendRejected, match="tied embeddings"):
        await backend.update_weights(str(checkpoints.second), 3)


async def test_each_token_is_of_the_weights_that_its_version_names(backend, untied_checkpoints):
    """Abort a request for new weights and resume it under them: each part agrees with its own weights."""
    checkpoints = untied_checkpoints
    await backend.update_weights(str(checkpoints.first), 1)
    prompt, parts = [(7 * i + 11) % 256 for i in range(40)], []
    request = GenerateRequest(new_request_id(), prompt, SamplingOptions(max_new_tokens=1500))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect, parts, lambda: backend.generate(request))
        while not parts and not (await backend.load()).running:  # by chance it may end at its first tokens
            await anyio.sleep(0.01)
        await backend.pause(PauseMode.ABORT)
    await backend.update_weights(str(checkpoints.second), 2)
    await backend.resume()
    (first,) = parts
    resumed = GenerateRequest(new_request_id(), [*prompt, *first.output_ids], SamplingOptions(max_new_tokens=30))
    second = await backend.generate(resumed)
    assert set(first.versions) <= {1}
    assert set(second.versions) == {2}
    for model, asked, part in ((checkpoints.first, request, first), (checkpoints.second, resumed, second)):
        (logprobs,) = await anyio.to_thread.run_sync(recompute, DEFAULT_ENVIRONMENT, model, [asked], [part])
        assert largest_difference(part.logprobs, logprobs) < TOLERANCE

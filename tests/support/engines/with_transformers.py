"""Ask transformers about a model, in a program of an environment that has it."""

import json
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from rollout_service.engines.contract import Backend, GenerateRequest, Generation, SamplingOptions, new_request_id


def ask_transformers(environment: Path, script: str, order: Any) -> Any:
    """Run a script of this folder, and return its answer to an order."""
    command = [environment / "bin" / "python", "-W", "ignore", Path(__file__).with_name(script)]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def some_requests(seed: int, samplings: Sequence[SamplingOptions]) -> list[GenerateRequest]:
    """Return requests with prompts of many lengths, some of which share a prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(9, 500) for _ in range(120)]
    prompts = [[rng.randrange(9, 500) for _ in range(length)] for length in (1, 2, 17, 60, 120, 250)]
    prompts += [shared + prompt[:20] for prompt in prompts]
    return [
        GenerateRequest(new_request_id(), prompt, samplings[index % len(samplings)])
        for index, prompt in enumerate(prompts)
    ]


async def generate_together(backend: Backend, requests: Sequence[GenerateRequest]) -> list[Generation]:
    results: dict[int, Generation] = {}

    async def generate(index: int) -> None:
        results[index] = await backend.generate(requests[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(requests)):
            tasks.start_soon(generate, index)
    return [results[index] for index in range(len(requests))]


def temperature_of(request: GenerateRequest) -> float:
    return request.sampling.temperature or 1.0


def recompute(
    environment: Path, model: Path, requests: Sequence[GenerateRequest], generations: Sequence[Generation]
) -> Any:
    """Return the logprobs of all sampled tokens, as transformers computes them."""
    sequences = [
        {"prompt": list(request.input_ids), "output": each.output_ids, "temperature": temperature_of(request)}
        for request, each in zip(requests, generations, strict=True)
    ]
    return ask_transformers(environment, "recompute_logprobs.py", {"model": str(model), "sequences": sequences})


def largest_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the largest difference; that of unlikely tokens counts relatively, as float32 rounds large logits more."""
    assert len(left) == len(right)
    return max((abs(a - b) / max(1.0, abs(a)) for a, b in zip(left, right, strict=True)), default=0.0)

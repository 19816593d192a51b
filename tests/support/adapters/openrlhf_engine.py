"""The part of OpenRLHF's actor that the adapter uses, around the real vLLM; run it with the Python of vLLM.

python openrlhf_engine.py MODEL      (the service is at ROLLOUT_URL, the next weights are in the file NEW_WEIGHTS)

Each line of standard input is an order, which a line of JSON answers. OpenRLHF itself is not in vLLM's environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from safetensors.torch import load_file, save_file
from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

from rollout_client.adapters.engines import TrainerEngines
from rollout_client.adapters.openrlhf import Executor
from rollout_client.adapters.submit import RolloutSubmitter

LEASE_SECONDS = 3
PARAMETER = "model.norm.weight"


class Worker:
    """vLLM mixes this into its worker, as it does with OpenRLHF's; weights come from a file instead of a broadcast."""

    def update_weight(self: Any, name: str, dtype: str, shape: list[int], empty_cache: bool = False) -> None:
        weight = load_file(os.environ["NEW_WEIGHTS"])[name]
        assert list(weight.shape) == shape
        self.model_runner.model.load_weights(weights=[(name, weight)])


class Actor:
    """The actor that runs the executor, with OpenRLHF's own calls of vLLM."""

    def __init__(self, model: str) -> None:
        arguments = AsyncEngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_num_seqs=32,
            block_size=32,
            enable_prefix_caching=True,
            worker_extension_cls="tests.support.adapters.openrlhf_engine.Worker",
            logprobs_mode="processed_logprobs",
            max_logprobs=1,
        )
        self.llm = AsyncLLMEngine.from_engine_args(arguments)
        self.executor = Executor()
        submitter = RolloutSubmitter.from_environment(retries=0)
        self.executor.engines = TrainerEngines("openrlhf", submitter, kind="sglang", lease_seconds=LEASE_SECONDS)
        self.held: asyncio.Task[Any] | None = None

    async def update_weight(self, name: str, dtype: str, shape: list[int], empty_cache: bool = False) -> Any:
        return await self.llm.collective_rpc("update_weight", args=(name, dtype, shape, empty_cache))

    async def rollouts(self, task: str, count: int) -> list[dict[str, Any]]:
        params = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=256, min_tokens=1, logprobs=1)
        one = (task, None, params, 2048, None, self, None)
        return await asyncio.gather(*[self.executor.execute(*one) for _ in range(count)])

    async def update(self) -> None:
        """Make the next weights, and give them to the engine in two calls, of which only the second is the last."""
        weights = load_file(os.environ["NEW_WEIGHTS"])
        weights[PARAMETER] *= 2
        save_file(weights, os.environ["NEW_WEIGHTS"], metadata={"format": "pt"})
        await self.llm.reset_prefix_cache()
        for is_last in (False, True):
            shape = list(weights[PARAMETER].shape)
            await self.update_weight(PARAMETER, "float32", shape, empty_cache=is_last)

    async def hold(self, task: str) -> int:
        """Pause as OpenRLHF does before it sends weights, and return the requests of a rollout that waits."""
        await self.llm.pause_generation(mode="keep")
        self.held = asyncio.create_task(self.rollouts(task, 1))
        return await self.until(1)

    async def until(self, unfinished: int) -> int:
        """Wait until so many requests are in the engine, and return their number."""
        async with asyncio.timeout(60):
            while self.llm.output_processor.get_num_unfinished_requests() != unfinished:
                await asyncio.sleep(0.02)
        return unfinished

    async def let_go(self) -> str:
        """End the pause, and return what became of the rollout."""
        assert self.held is not None
        await self.llm.resume_generation()
        return repr((await asyncio.gather(self.held, return_exceptions=True))[0])

    async def close(self) -> None:
        await asyncio.to_thread(self.executor.engines.close)


async def main(model: str) -> None:
    actor = Actor(model)
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *given = json.loads(line)
        sys.stdout.write(json.dumps(await getattr(actor, name)(*given)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

"""Runs a rollout on an engine that verl's own load balancer hands over, in a real Ray, and prints figures as JSON.

python verl_engines.py ENGINE_URL      (the service is at ROLLOUT_URL)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from types import SimpleNamespace

import ray
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer, get_router_handle

from rollout_client import SyncRolloutClient
from rollout_client.adapters import verl

ROW = {"environment": "math", "instance": {"question": "2 + 2", "answer": "4"}}


@ray.remote
class Server:
    """The part of verl's server that the adapter reads; the server itself needs a GPU."""

    def __init__(self) -> None:
        self.global_steps: int | None = None

    async def set_global_steps(self, step: int) -> None:
        self.global_steps = step


async def main(engine: str) -> None:
    address = engine.removeprefix("http://")
    server = Server.remote()
    balancer = get_router_handle({address: server}, load_balancer_cls=GlobalRequestLoadBalancer)
    rollout = SimpleNamespace(prompt_length=512, response_length=512, name=None, full_determinism=False)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout), trainer=SimpleNamespace(use_v1=True))
    loop = verl.RolloutAgentLoop(SimpleNamespace(config=config), LLMServerClient(config, balancer))
    steps = []
    for step in (7, 8):
        await server.set_global_steps.remote(step)
        (output,) = await loop.run({"temperature": 1.0}, **ROW)
        fields = output.extra_fields
        steps.append([fields["min_global_steps"], fields["max_global_steps"]])
    status = await balancer.get_status.remote()
    await loop.engines.submitter.aclose()
    with SyncRolloutClient(os.environ["ROLLOUT_URL"]) as client:
        pools = [one.pool for one in client.backends()]
        loop.engines.close()
        left = len(client.backends())
    figures = {"steps": steps, "pools": pools, "left": left, "in_flight": status["total_inflight"]}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    asyncio.run(main(sys.argv[1]))
    ray.shutdown()

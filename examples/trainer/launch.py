"""Start a service and an engine for the trainer, so that one command is enough; a real trainer gets a URL instead.

Guarantee: both end when the block is left, and when this process is killed.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rollout_client import RolloutClient
from rollout_service.cli.server_child import running_server
from rollout_service.engines.local_servers.cpu_server import SGLangCpuServer
from rollout_service.engines.shipped import policy_folder

BASE = policy_folder("calc-base")
"""The policy that training begins with; half of its answers are right."""
ORCHESTRATOR = policy_folder("parl-base")
"""The policy that begins to learn to hand on work, and that of its sub-agents."""
SGLANG_START_SECONDS = 600.0
"""The limit for SGLang's start, which takes 20 s on an idle machine and minutes on a busy one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The service and the engine to start."""

    engine: str
    """`embedded` or `sglang`."""
    sandbox: str = "apptainer"
    workers: int = 8
    """The number of agents that run at once."""
    environments: Sequence[Path] = ()
    """Folders with an `environment.toml`."""
    plug_ins: Sequence[Path] = ()
    """Folders of Python code with environments as entry points."""
    pool_models: Sequence[str] = ()
    """More pools, each with an engine of its own: `POOL=MODEL`."""


@asynccontextmanager
async def serving(plan: Plan, model: Path, folder: Path) -> AsyncIterator[RolloutClient]:
    """Run a service with its store in `folder`, and an engine that starts with the weights in `model`."""
    flags = ["--sandbox", plan.sandbox, "--rollout-workers", str(plan.workers), "--log-level", "warning"]
    for path in plan.environments:
        flags += ["--environment", str(path)]
    for model_of_pool in plan.pool_models:
        flags += ["--pool-model", model_of_pool]
    if plan.plug_ins:  # the service is a child of this process
        os.environ["PYTHONPATH"] = os.pathsep.join(str(path.resolve()) for path in plan.plug_ins)
    async with AsyncExitStack() as stack:
        if plan.engine == "sglang":
            server = SGLangCpuServer(model)
            server.start_seconds = SGLANG_START_SECONDS
            engine = await stack.enter_async_context(server)
            flags += ["--backend", engine.url]
        else:
            flags += ["--model", str(model)]
        yield await stack.enter_async_context(running_server(folder, flags))

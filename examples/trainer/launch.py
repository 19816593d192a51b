"""A service and an engine of the trainer's own, so that one command is enough; a real trainer gets a URL instead.

Guarantee: both have ended when the block is left, also when this process is killed.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rollout_client import RolloutClient
from rollout_service.cli.server_child import running_server
from rollout_service.inference.local_servers.sglang_cpu import SGLangCpuServer
from rollout_service.policies.shipped import policy_folder

BASE = policy_folder("calc-base")
"""The policy that training begins with: half of its answers are right."""
SGLANG_START_SECONDS = 600.0
"""It takes 20 on a machine of its own, and minutes on a busy one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start."""

    engine: str
    """`embedded` or `sglang`."""
    sandbox: str = "apptainer"
    workers: int = 8
    """Agents at once."""
    environments: Sequence[Path] = ()
    """Folders with an `environment.toml`."""
    plug_ins: Sequence[Path] = ()
    """Folders of Python with environments as entry points."""


@asynccontextmanager
async def serving(plan: Plan, model: Path, folder: Path) -> AsyncIterator[RolloutClient]:
    """A service whose store is in `folder`, over an engine that begins with the weights in `model`."""
    flags = ["--sandbox", plan.sandbox, "--rollout-workers", str(plan.workers), "--log-level", "warning"]
    for path in plan.environments:
        flags += ["--environment", str(path)]
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

"""The measurements of tasks of software repair: their evaluation beside the tests' own time, and many at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from common import HERE
from support.environments.played_service import CLOCK, PlayedService, request, require_reward
from support.environments.rollout_costs import Figures, overhead_ms, start_ms

from api_schemas.rollouts import RolloutRequest
from rollout_service.environments.swe.repository import apply_patch, go_to_start
from rollout_service.environments.swe.tasks import SweTask, read_task
from sandboxes import ApptainerConfig, SandboxProvider, SandboxSpec, make_provider

ROOT = HERE.parent
FOLDER = ROOT / ".cache" / "swe"
"""Made by `ensure_swe` of scripts/lib.sh."""
NAME = "swe-packages"
SECONDS = 600.0
SHARE_WITHOUT_REPAIR = 4
"""One of so many agents repairs nothing: its patch is a comment, for which all tests run too."""


@dataclass(frozen=True, slots=True)
class SweInstance:
    """One task, and two scripts for agents that work on it."""

    fields: dict[str, Any]

    @property
    def task(self) -> SweTask:
        return read_task(self.fields)

    def commands(self) -> dict[str, list[str]]:
        changed = next(line[6:] for line in self.fields["patch"].splitlines() if line.startswith("+++ b/"))
        repair = f"{CLOCK}; cd /testbed && git apply <<'END'\n{self.fields['patch']}END\n"
        comment = f"{CLOCK}; echo '# looked at' >>'/testbed/{changed}'"
        return {self._mark("repair"): [repair], self._mark("comment"): [comment]}

    def request(self, script: str = "repair") -> RolloutRequest:
        said = f"{self.fields['problem_statement']} [play {self._mark(script)}]"
        return request(NAME, **self.fields | {"problem_statement": said})

    def _mark(self, script: str) -> str:
        return f"{self.fields['instance_id']}-{script}"


async def read_instances() -> list[SweInstance]:
    """Return the tasks that the tests use, which are made if they are missing."""
    await anyio.run_process(["bash", "-c", f"source '{ROOT}/scripts/lib.sh'; ensure_swe"], stderr=None)
    lines = (FOLDER / "instances.jsonl").read_text().splitlines()
    return [SweInstance(json.loads(line)) for line in lines]


async def _run_tests(provider: SandboxProvider, task: SweTask) -> float:
    async with await provider.start(SandboxSpec(image=task.image, network="none", memory_bytes=2 << 30)) as sandbox:
        await go_to_start(sandbox, task)
        if why := await apply_patch(sandbox, task, task.gold):
            raise SystemExit(f"the repair of {task.instance_id} does not apply: {why}")
        await sandbox.write_file("/tmp/tests.sh", task.script.encode(errors="surrogateescape"))
        begun = time.perf_counter()
        await sandbox.exec(["bash", "/tmp/tests.sh"], cwd=task.folder, timeout=SECONDS)
        return (time.perf_counter() - begun) * 1e3


@asynccontextmanager
async def _provider() -> AsyncIterator[SandboxProvider]:
    with TemporaryDirectory(prefix="rollout-benchmark-") as state:
        made = make_provider(ApptainerConfig(), Path(state))
        try:
            yield made
        finally:
            await made.close()


@dataclass(slots=True)
class SweTimes:
    """Times in ms of rollouts one after the other."""

    starts: list[float] = field(default_factory=list)
    stages: list[float] = field(default_factory=list)
    """The evaluate stage of each rollout."""
    alone: list[float] = field(default_factory=list)
    """The same tests by themselves, right before the rollout."""

    @property
    def overheads(self) -> list[float]:
        return [stage - alone for stage, alone in zip(self.stages, self.alone, strict=True)]


async def one_by_one(service: PlayedService, instances: Sequence[SweInstance], count: int) -> SweTimes:
    """Run rollouts of each task by turns, with the tests by themselves in between.

    The first rollout of each task is not counted: its evaluation proves that the tests run, once for a service.
    """
    times = SweTimes()
    async with _provider() as provider:
        for number in range(count + 1):
            for instance in instances:
                alone = await _run_tests(provider, instance.task)
                [rollout] = await service.run(instance.request())
                require_reward(rollout)
                if number:
                    times.alone.append(alone)
                    times.stages.append(overhead_ms(rollout, 0.0))
                    times.starts.append(start_ms(rollout))
    return times


async def many_at_once(
    service: PlayedService, instances: Sequence[SweInstance], alone_ms: float, count: int
) -> Figures:
    """Run so many rollouts at once, of which one in four repairs nothing and must not be rewarded.

    `alone_ms` is the time of one task's tests by themselves.
    """
    wanted: dict[str, float] = {}
    requests = []
    for number in range(count):
        script = "comment" if number % SHARE_WITHOUT_REPAIR == 1 else "repair"
        named = instances[number // 2 % len(instances)].request(script)
        named = named.model_copy(update={"rollout_id": f"swe-{number}"})
        wanted[f"swe-{number}"] = float(script == "repair")
        requests.append(named)
    begun = time.perf_counter()
    rollouts = await service.run(*requests)
    seconds = time.perf_counter() - begun
    for rollout in rollouts:
        require_reward(rollout, wanted[rollout.rollout_id])
    cores = len(os.sched_getaffinity(0))
    return {
        "rollouts_at_once": count,
        "rollouts_rewarded": sum(rollout.reward == 1.0 for rollout in rollouts),
        "rollouts_per_minute": count / seconds * 60,
        "limit_rollouts_per_minute": cores * 60e3 / alone_ms,
    }

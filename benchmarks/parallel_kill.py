"""Count what is lost or left behind when the service is killed with SIGKILL while sub-agents are at work.

Run: python benchmarks/parallel_kill.py [--sandbox local|apptainer] [--json FILE] [--quick | --smoke]

Agents assign four tasks in one turn to sub-agents, which have their own sandboxes, and a frozen pool with an engine of
its own. Each round kills the service at a random moment at which that engine is at work, looks at what is left, and
starts the service again. Finally the rollouts are counted:

- `lost`: rollouts that have not ended; `failed`: those that did not complete; `torn`: those that completed with other
  sub-agents than the four of one attempt;
- `duplicated`: rollouts that ended twice;
- `left_on_frozen`: requests that the engine of the frozen pool still works on a second after the kill. Its turns take
  longer than that;
- `sandboxes_left`: processes of the service and folders of its sandboxes that outlive it by five seconds.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx
import psutil
from anyio.abc import Process
from common import Figures, Options, folder_kept_on_error, report, run, scripted_engine

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, TokenExtras
from api_schemas.rollouts.trees import NodeDetail
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_service.cli.server_child import stop
from rollout_service.store.sqlite import SqliteStore
from sandboxes.host.children import start_process
from sandboxes.host.ports import free_port

ROUNDS, QUICK_ROUNDS, SMOKE_ROUNDS = 20, 3, 1
ROLLOUTS_AT_ONCE = 3
WIDTH = 4
POLICY_SECONDS, FROZEN_SECONDS = 0.1, 2.5
LONGEST_SECONDS = 6.0
"""A kill comes at a random moment within this time after a wave was seen; it is longer than an episode, so some end."""
GONE_SECONDS = 1.0
RECLAIM_SECONDS = 5.0
WAVE_SECONDS = 120.0
END_SECONDS = 600.0
ENVIRONMENT = f"""
name = "team"
image = "base"
prompt = "Greet {{{{ instance.number }}}}."
[parallel]
max_assigns_per_turn = {WIDTH}
[parallel.subagent]
pool = "frozen-1"
tools = ["bash"]
sandbox = "own"
[sandbox]
memory = "256M"
[evaluate]
command = "echo '{{\\"reward\\": 1.0}}' > $ROLLOUT_RESULT"
sandbox = "same"
"""
CONFIG = """
[pipeline]
max_attempts = 1000
drain_seconds = 1
[sandboxes.pressure]
enabled = false
[sandbox]
provider = "{provider}"
run_dir = "{run_dir}"
"""


def calls(*wanted: tuple[str, dict[str, str]]) -> str:
    texts = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in wanted)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts) + "<|im_end|>"


POLICY_TURNS = (
    calls(
        ("create_subagent", {"name": "greeter", "system_prompt": "Greet."}),
        *(("assign_task", {"agent": "greeter", "prompt": f"Say hello {n}."}) for n in range(WIDTH)),
    ),
    "Greeted.<|im_end|>",
)
FROZEN_TURNS = (calls(("bash", {"command": "sleep 0.1; echo hello"})), "<result>hello</result><|im_end|>")


@dataclass(slots=True)
class Killed:
    """The service that is killed, and what was seen after each kill."""

    folder: Path
    policy_url: str
    frozen_url: str
    provider: str
    port: int = field(default_factory=free_port)
    process: Process | None = None
    submitted: int = 0
    """The number of rollouts, whose ids are counted from 0."""
    in_wave: list[int] = field(default_factory=list)
    """The requests that the engine of the frozen pool worked on at each kill."""
    left_on_frozen: int = 0
    frozen_idle_seconds: list[float] = field(default_factory=list)
    sandboxes_left: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def run_dir(self) -> Path:
        """The folder of its sandboxes."""
        return self.folder / "run"

    async def start(self) -> None:
        environment, config = self.folder / "team", self.folder / "rollout.toml"
        environment.mkdir(exist_ok=True)
        (environment / "environment.toml").write_text(ENVIRONMENT)
        backends = {"policy": self.policy_url, "frozen-1": self.frozen_url}
        tables = "".join(f'[[backends]]\nurl = "{url}"\npool = "{pool}"\n' for pool, url in backends.items())
        config.write_text(CONFIG.format(provider=self.provider, run_dir=self.run_dir) + tables)
        command = ["-m", "rollout_service.cli", "serve", "--config", str(config), "--port", str(self.port)]
        command += ["--state-dir", str(self.folder / "state"), "--environment", str(environment)]
        with (self.folder / "service.log").open("ab") as log:
            self.process = await start_process([sys.executable, *command], stdout=log, stderr=log)

    async def submit(self, client: RolloutClient) -> None:
        """Submit more rollouts, and wait until the sub-agents of several agents are at work."""
        for _ in range(ROLLOUTS_AT_ONCE):
            await client.submit(_order(self.submitted))
            self.submitted += 1
        with anyio.fail_after(WAVE_SECONDS):
            while await self.at_work() <= WIDTH:  # noqa: ASYNC110 - another process is at work
                await anyio.sleep(0.05)

    async def at_work(self) -> int:
        """Return how many requests the engine of the frozen pool works on."""
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"{self.frozen_url}/v1/loads")
        return sum(load["num_running_reqs"] for load in answer.json()["loads"])

    async def kill(self) -> bool:
        """Send SIGKILL to the service, and look at what outlives it; return False if no sub-agent is at work."""
        if self.process is None:
            raise RuntimeError("the service is not running")
        if not (in_wave := await self.at_work()):
            return False
        self.in_wave.append(in_wave)
        below = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        killed = time.perf_counter()
        await self.process.wait()
        await self.process.aclose()
        with anyio.move_on_after(GONE_SECONDS):
            while await self.at_work():  # noqa: ASYNC110 - another process is at work
                await anyio.sleep(0.02)
        self.frozen_idle_seconds.append(time.perf_counter() - killed)
        self.left_on_frozen += await self.at_work()
        left = ["unknown"]
        with anyio.move_on_after(RECLAIM_SECONDS):
            while left := self._left(below):  # noqa: ASYNC110 - other processes end meanwhile
                await anyio.sleep(0.05)
        self.sandboxes_left += left
        return True

    def _left(self, below: list[psutil.Process]) -> list[str]:
        """Return the folders of sandboxes, and those of the service's processes that live."""
        folders = [str(path) for path in self.run_dir.iterdir()] if self.run_dir.exists() else []
        return folders + [f"process {one.pid}" for one in below if _lives(one)]

    async def close(self) -> None:
        if self.process is not None:
            await stop(self.process)


async def main(given: Options) -> None:
    rounds = given.plan(ROUNDS, QUICK_ROUNDS, SMOKE_ROUNDS)
    seed, began = time.time_ns(), time.perf_counter()
    draw = random.Random(seed)
    with folder_kept_on_error("pkill-") as folder:
        async with AsyncExitStack() as stack:
            policy = await stack.enter_async_context(_engine(folder, "policy", POLICY_SECONDS, POLICY_TURNS))
            frozen = await stack.enter_async_context(_engine(folder, "frozen", FROZEN_SECONDS, FROZEN_TURNS))
            service = Killed(folder, policy, frozen, given.chosen["sandbox"])
            stack.push_async_callback(service.close)
            await service.start()
            client = await stack.enter_async_context(RolloutClient(service.url, patience_seconds=120))
            await client.ready()
            for _ in range(rounds):
                await service.submit(client)
                await anyio.sleep(draw.uniform(0, LONGEST_SECONDS))
                while not await service.kill():
                    await service.submit(client)
                await service.start()
            ended: list[Rollout] = []
            with anyio.move_on_after(END_SECONDS):
                for number in range(service.submitted):
                    ended.append(await client.wait(f"r{number}"))  # noqa: PERF401 - what has ended is kept
        figures = await _count(service, ended)
    figures = {"rounds": rounds} | figures | {"seconds": round(time.perf_counter() - began, 1)}
    aims = dict.fromkeys(("lost", "failed", "torn", "duplicated", "left_on_frozen", "sandboxes_left"), "0")
    report(
        "kill -9 while sub-agents are at work",
        given,
        {"seed": seed, "sandbox": service.provider, "width": WIDTH},
        figures,
        aims,
    )
    for left in service.sandboxes_left:
        sys.stderr.write(f"left: {left}\n")


def _lives(process: psutil.Process) -> bool:
    """Return whether this very process is running, and not just a later one with its pid."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _engine(folder: Path, name: str, seconds: float, turns: tuple[str, ...]) -> AbstractAsyncContextManager[str]:
    said = [text for turn in turns for text in ("--turn", turn)]
    return scripted_engine(folder / f"{name}.address", "--delay", f"{seconds:g}", *said)


def _order(number: int) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=f"r{number}",
        task=Task(environment="team", instance={"number": number}),
        exports=TokenExtras(nodes=NodeDetail.SUMMARY),
    )


async def _count(service: Killed, ended: list[Rollout]) -> Figures:
    """Count what the service reports of its rollouts, next to what was seen after each kill."""
    async with await SqliteStore.open(service.folder / "state" / "rollouts.sqlite3") as store:
        events = await store.events(after=0, limit=1_000_000)
    terminal = {state.value for state in RolloutState if state.terminal}
    ends = Counter(event.subject for event in events if event.data.get("state") in terminal)
    completed = [one for one in ended if one.state is RolloutState.COMPLETED]
    return {
        "rollouts": len(ended),
        "lost": service.submitted - len(ends),
        "failed": len(ended) - len(completed),
        "torn": sum(not _is_whole(one) for one in completed),
        "duplicated": sum(count - 1 for count in ends.values()),
        "begun_again": sum(one.attempt > 1 for one in ended),
        "in_wave_min": min(service.in_wave),
        "in_wave_max": max(service.in_wave),
        "left_on_frozen": service.left_on_frozen,
        "frozen_idle_seconds_max": round(max(service.frozen_idle_seconds), 3),
        "sandboxes_left": len(service.sandboxes_left),
    }


def _is_whole(rollout: Rollout) -> bool:
    """Return whether a rollout has the sub-agents of one attempt, each once."""
    ids = [node.node_id for node in rollout.nodes]
    return ids == [f"{rollout.rollout_id}/{n}" for n in range(1, WIDTH + 1)] and all(
        node.valid for node in rollout.nodes
    )


if __name__ == "__main__":
    run(main, __doc__ or "", {"sandbox": ["local", "apptainer"]})

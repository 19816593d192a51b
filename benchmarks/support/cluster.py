"""A cluster under faults: three nodes on machines of their own, two engines, and a Redis that all of them share.

Guarantee: a fault returns once the cluster is well again: every node and engine is in service, as seen from each node.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import psutil
from anyio.abc import Process
from common import HERE
from pydantic import HttpUrl
from support.network import HUB, Machine, machine
from support.redis_usage import MeasuredRedis, redis_program

from api_schemas.inference import BackendSpec
from rollout_client.client import RolloutClient
from rollout_service.cli.server_child import stop
from rollout_service.cluster.leadership import RUNS_ROLE
from sandboxes.host.children import start_process

sys.path.insert(0, str(HERE.parent))  # the tests' object store
from tests.support.store.object_server import SERVICE, ObjectServer, keys

NODES = ("n1", "n2", "n3")
ENGINES = ("e1", "e2")
PORT, REDIS_PORT, FIRST_ENGINE_PORT = 8080, 6379, 30_001
WELL_SECONDS = 120.0
LEASE_SECONDS = 4.0
"""How long a rollout stays leased to a node that has stopped renewing the lease."""
_LOOK_SECONDS = 0.1
_ASK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of the cluster, and the number of its faults."""

    rounds: int
    turn_seconds: float
    """How long an engine takes for a turn."""
    away_seconds: tuple[float, float]
    """Between which times a node is stopped or cut off."""
    longest_seconds: float
    """A fault comes at a random moment within this time after the last observed progress."""
    sandbox: str = "local"
    trajectories: str = "folder"
    """Where they are: in a `folder` that the nodes share, or in a bucket (`s3`)."""
    shards: str = "1"
    """Over how many Redis the store is spread."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    address: str | None
    """The node that it hit, if it hit one."""
    at: float
    """When it began, in seconds of the monotonic clock."""
    well_seconds: float
    """How long the cluster took to be well again, from the end of the fault."""


@dataclass(slots=True)
class Cluster:
    folder: Path
    plan: Plan
    machines: dict[str, Machine] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    networks: dict[str, int] = field(default_factory=dict)
    """The namespaces of all machines that there were, with the descriptors that pin them."""
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    objects: ObjectServer = field(init=False)
    """The object store, if the trajectories are there."""
    objects_address: str = field(init=False)
    _machines: AsyncExitStack = field(default_factory=AsyncExitStack)

    def __post_init__(self) -> None:
        self.objects = ObjectServer(self.folder / "objects", host=HUB)
        self.objects_address = self.objects.address()

    @property
    def needs_objects(self) -> bool:
        """Whether the trajectories are in the object store."""
        return self.plan.trajectories == "s3"

    @property
    def redises(self) -> list[str]:
        """The names of the shards of the store, mostly one."""
        return [f"redis{number}" for number in range(int(self.plan.shards))]

    @property
    def redis_urls(self) -> list[str]:
        return [f"redis://{HUB}:{REDIS_PORT + number}/0" for number in range(len(self.redises))]

    @property
    def urls(self) -> list[str]:
        return [self.url(name) for name in NODES]

    def url(self, node: str) -> str:
        return f"http://{self.machines[node].address}:{PORT}"

    def record(self, engine: str) -> Path:
        """Return the file with an engine's turns."""
        return self.folder / f"{engine}.turns"

    async def start(self, stack: AsyncExitStack) -> None:
        """Start everything, and wait until it is well; the stack ends it."""
        self._machines = stack
        stack.push_async_callback(self.close)
        for name in NODES:
            await self._start_machine(name)
        stack.push_async_callback(self.close)  # before the machines end, under their services
        objects = ("objects",) if self.needs_objects else ()
        for name in (*self.redises, *objects, *ENGINES, *NODES):
            await self.run(name)
        async with RolloutClient(self.urls[0], self.key, patience_seconds=WELL_SECONDS) as client:
            for engine in ENGINES:
                await client.add_backend(BackendSpec(url=HttpUrl(f"http://{HUB}:{_engine_port(engine)}")))
        await self.until_well()

    async def run(self, name: str, **settings: float) -> None:
        """Start one of the processes; `settings` are those of a node's retention."""
        if name in self.redises:
            command = await self._redis(name)
        elif name == "objects":
            self.objects.folder.mkdir(exist_ok=True)
            self.objects.prepare()
            command = self.objects.command()
        elif name in ENGINES:
            command = self._engine(name)
        else:
            command = self._node(name, settings)
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = os.environ | (keys(SERVICE) if self.needs_objects and name in NODES else {})
            self.processes[name] = await start_process(command, stdout=log, stderr=log, env=environment)
        if name in self.redises:
            await MeasuredRedis(self.folder / name).wait_until_ready()
        elif name == "objects":
            await anyio.to_thread.run_sync(self.objects.wait_until_ready)

    async def fault(self, kind: str, draw: random.Random) -> Fault:
        """Let a fault happen, and wait until the cluster is well again."""
        victim = await self._victim(kind, draw)
        at = time.monotonic()
        if kind == "machine":
            await self.machines[victim].lose()
            await self.processes[victim].wait()
            await self._start_machine(victim)
            await self.run(victim)
        elif kind == "folder":
            leave = self._without_objects if self.needs_objects else self._without_folder
            await leave(draw.uniform(*self.plan.away_seconds), draw.random() < 0.5)
        elif kind in ("pause", "partition"):
            await self._away(kind, victim, draw.uniform(*self.plan.away_seconds))
        else:
            self._signal(victim, signal.SIGKILL)
            await self.processes[victim].wait()
            await self.processes[victim].aclose()
            await self.run(victim)
        ended = time.monotonic()
        await self.until_well()
        address = self.machines[victim].address if victim in self.machines else None
        return Fault(kind, address, at, time.monotonic() - ended)

    async def until_well(self) -> None:
        """Wait until every node and engine is in service, as seen from each node.

        Raises:
            TimeoutError: It takes too long.
        """
        why = "nothing was asked"
        with anyio.move_on_after(WELL_SECONDS):
            async with self._client() as client:
                while why := await self._problem(client):  # noqa: ASYNC110 - other processes change it
                    await anyio.sleep(_LOOK_SECONDS)
                return
        raise TimeoutError(f"the cluster is not well after {WELL_SECONDS:g} s: {why}")

    async def stop_nodes(self) -> None:
        running = [name for name in NODES if self.processes[name].returncode is None]
        for name in running:
            self._signal(name, signal.SIGTERM)
        for name in running:
            await self.processes[name].wait()

    async def close(self) -> None:
        """End the processes that still run; idempotent."""
        for process in self.processes.values():
            await stop(process)
        self.objects.remove_sockets()

    async def _start_machine(self, name: str) -> None:
        context = machine(name, 1 + NODES.index(name))
        self.machines[name] = await self._machines.enter_async_context(context)
        self.networks[self.machines[name].network] = self.machines[name].pin

    async def _away(self, kind: str, node: str, seconds: float) -> None:
        """Stop a node for a while, or cut it off from everything."""
        if kind == "partition":
            await self.machines[node].cut()
            await anyio.sleep(seconds)
            await self.machines[node].heal()
            return
        self._signal(node, signal.SIGSTOP)
        try:
            await anyio.sleep(seconds)
        finally:
            self._signal(node, signal.SIGCONT)

    async def _without_objects(self, seconds: float, is_killed: bool) -> None:
        """Kill or stop the object store for a while."""
        self._signal("objects", signal.SIGKILL if is_killed else signal.SIGSTOP)
        await anyio.sleep(seconds)
        if is_killed:
            await self.processes["objects"].wait()
            await self.processes["objects"].aclose()
            await self.run("objects")
        else:
            self._signal("objects", signal.SIGCONT)

    async def _without_folder(self, seconds: float, is_empty: bool) -> None:
        """Move the shared folder away for a while, as if its file system were not mounted."""
        shared, away = self.folder / "shared", self.folder / "away"
        shared.rename(away)
        try:
            if is_empty:
                shared.mkdir()
            await anyio.sleep(seconds)
        finally:
            if is_empty:
                shared.rmdir()  # nobody may have written there
            away.rename(shared)

    async def _victim(self, kind: str, draw: random.Random) -> str:
        if kind == "folder":
            return kind
        if kind == "redis":
            return draw.choice(self.redises)
        if kind == "engine":
            return draw.choice(ENGINES)
        return await self._leader() if kind == "leader" else draw.choice(NODES)

    async def _leader(self) -> str:
        """Return the node that leads the runs."""
        async with self._client() as client:
            with anyio.fail_after(WELL_SECONDS):
                while True:
                    for name in NODES:
                        answer = await client.get(f"{self.url(name)}/metrics")
                        if f'rollout_node_leads{{role="{RUNS_ROLE}"}} 1.0' in answer.text:
                            return name
                    await anyio.sleep(_LOOK_SECONDS)

    def _signal(self, name: str, number: int) -> None:
        """Send a signal to a process; that of a node is the child of `nsenter`, which stops when its child does."""
        pid = self.processes[name].pid
        if name in self.machines:
            [child] = psutil.Process(pid).children()
            os.kill(child.pid, number)
        if name not in self.machines or number == signal.SIGCONT:
            os.kill(pid, number)

    async def _problem(self, client: httpx.AsyncClient) -> str | None:
        for name in NODES:
            if (code := self.processes[name].returncode) is not None:
                raise RuntimeError(f"{name} has ended with exit code {code}; see its log")
            try:
                ready = await client.get(f"{self.url(name)}/ready")
                nodes = (await client.get(f"{self.url(name)}/v1/nodes")).raise_for_status().json()
                backends = (await client.get(f"{self.url(name)}/v1/backends")).raise_for_status().json()
            except httpx.HTTPError as error:
                return f"{name}: {error!r}"
            states = {node["node"]: node["state"] for node in nodes}
            engines = [backend["state"] for backend in backends]
            if not ready.is_success or "of shard" in ready.text or states != dict.fromkeys(NODES, "ready"):
                return f"{name}: {ready.text}, nodes {states}"
            if engines != ["ready"] * len(ENGINES):
                return f"{name}: engines {engines}"
        return None

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=_ASK_SECONDS, headers={"authorization": f"Bearer {self.key}"})

    async def _redis(self, name: str) -> Sequence[str]:
        folder, port = self.folder / name, REDIS_PORT + self.redises.index(name)
        folder.mkdir(exist_ok=True)
        options = {"bind": HUB, "port": str(port), "protected-mode": "no", "dir": str(folder)}
        options |= {"unixsocket": str(folder / "redis.sock"), "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "always"}
        words = [text for name, value in options.items() for text in (f"--{name}", value)]
        return [str(await redis_program()), *words]

    def _engine(self, name: str) -> Sequence[str]:
        script = [str(HERE / "engine.py"), "--delay", str(self.plan.turn_seconds), "--host", HUB]
        script += ["--port", str(_engine_port(name)), "--address", str(self.folder / f"{name}.address")]
        return [sys.executable, *script, "--record", str(self.record(name))]

    def _node(self, name: str, retention: dict[str, float]) -> Sequence[str]:
        keys = self.folder / "keys.toml"
        if not keys.exists():
            keys.touch(0o600)
            keys.write_text(f'[[keys]]\nname = "chaos"\nkey = "{self.key}"\n')
        config = self.folder / f"{name}.toml"
        config.write_text(self._settings(name) + "".join(f"{key} = {value}\n" for key, value in retention.items()))
        serve = ["-m", "rollout_service.cli", "serve", "--config", str(config), "--keys-file", str(keys)]
        return self.machines[name].command([sys.executable, *serve])

    def _place(self) -> str:
        if self.needs_objects:
            return self.objects.settings(self.objects_address)
        return f'folder = "{self.folder / "shared"}"'

    def _settings(self, name: str) -> str:
        """Return the settings of a node, with the retention last."""
        return f"""
host = "{self.machines[name].address}"
port = {PORT}
state_dir = "{self.folder / f"state-{name}"}"
engine = "none"
environments = ["{HERE / "environments" / "echo"}"]
[sandbox]
provider = "{self.plan.sandbox}"
run_dir = "{self.folder / f"run-{name}"}"
[sandboxes.pressure]
enabled = false  # the load is intended
[sandboxes.warm]
size = 0
[pipeline]
init_workers = 4
rollout_workers = 16
evaluate_workers = 4
max_attempts = 1000
lease_seconds = {LEASE_SECONDS}
drain_seconds = 1
[store]
url = {json.dumps(self.redis_urls)}
{self._place()}
[cluster]
name = "{name}"
[retention]
"""


def _engine_port(name: str) -> int:
    return FIRST_ENGINE_PORT + ENGINES.index(name)

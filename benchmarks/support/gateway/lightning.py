"""Agent Lightning's server with its model proxy, as a process; `scripts/install-lightning` installs it.

Its settings are its defaults, but for the address, the key and the model's name: it asks the engine for ids and
log-probabilities of every answer, and keeps each request with its answer in memory.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import psutil
from common import START_SECONDS
from support.gateway.agents import Access
from support.gateway.targets import Engine

from rollout_service.cli.server_child import stop
from sandboxes.host.children import start_process
from sandboxes.host.ports import free_port

ROOT = Path(__file__).parents[3]
KEY = "benchmark"
MODEL = "policy"
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class LightningProxy:
    """A running server."""

    url: str
    process: psutil.Process

    @property
    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    @asynccontextmanager
    async def open(self, count: int) -> AsyncIterator[Sequence[Access]]:
        """Create a rollout for each agent."""
        async with _client(self.url) as http:
            ids = [uuid.uuid4().hex for _ in range(count)]
            created = [{"input": "", "rollout_id": rollout_id} for rollout_id in ids]
            (await http.post("/api/rollouts", json=created)).raise_for_status()
        paths = [f"/proxy/rollout/{rollout_id}/attempt/0/mode/train/openai/v1" for rollout_id in ids]
        yield [Access(self.url + path, KEY) for path in paths]


@asynccontextmanager
async def lightning_proxy(folder: Path, engine: Engine) -> AsyncIterator[LightningProxy]:
    """Install it if it is not there, and run it in front of one engine."""
    await anyio.run_process([str(ROOT / "scripts" / "install-lightning")], stderr=None)
    port = free_port()
    command = [str(ROOT / ".venv-lightning" / "bin" / "agl-server"), "host=127.0.0.1", f"port={port}"]
    command += [f"key={KEY}", f"default_proxy.model_name={MODEL}", f"hydra.run.dir={folder / 'lightning'}"]
    with (folder / "lightning.log").open("wb") as log:
        process = await start_process(command, stdout=log, stderr=log, new_session=True)
    try:
        proxy = LightningProxy(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
        async with _client(proxy.url) as http:
            await _until_healthy(http)
            model = {"model": MODEL, "endpoint": f"{engine.url}/v1"}
            (await http.post("/api/models", json=[model])).raise_for_status()
        yield proxy
    finally:
        await stop(process)


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=START_SECONDS)


async def _until_healthy(http: httpx.AsyncClient) -> None:
    with anyio.fail_after(START_SECONDS):
        while True:
            try:
                (await http.get("/healthz")).raise_for_status()
            except httpx.TransportError:
                await anyio.sleep(_POLL_SECONDS)
            else:
                return

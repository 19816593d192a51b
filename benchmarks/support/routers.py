"""Runs the engine vendors' routers as processes; `scripts/install-routers` installs them in a separate environment."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import anyio
import orjson

from rollout_service.engines.contract import GenerateRequest, Generation
from rollout_service.engines.kinds.http_backend import dump_request
from rollout_service.engines.kinds.sglang.wire import generate_body, parse_generation
from rollout_service.engines.local_servers.process import EngineStartError, ServerCommand, ServerProcess
from sandboxes.host.ports import free_port

_POLL_SECONDS = 0.2
ENVIRONMENT = Path(__file__).parents[2] / ".venv-routers"


class Router(ServerProcess):
    """Routes to `workers` by a policy of `smg` or `vllm-router` while the context lasts, with its other defaults.

    Raises:
        EngineStartError: The router is not installed or does not start; raised on entering.
    """

    def __init__(self, program: str, policy: str, workers: Sequence[str]) -> None:
        super().__init__()
        self._program, self._policy = program, policy
        self._workers = workers
        self._port, self._metrics_port = free_port(), free_port()

    async def until_ready(self, http: aiohttp.ClientSession) -> None:
        """Return once it sends requests to every worker, which is some time after it becomes healthy."""
        with anyio.fail_after(self.start_seconds):
            while True:
                if await self._healthy_workers(http) == len(self._workers):
                    return
                await anyio.sleep(_POLL_SECONDS)

    async def _healthy_workers(self, http: aiohttp.ClientSession) -> int:
        try:
            async with http.get(f"{self.url}/workers") as answer:
                workers = (await answer.json())["workers"]
        except aiohttp.ClientError:
            return 0
        return sum(worker["is_healthy"] for worker in workers)

    async def generate(self, http: aiohttp.ClientSession, session: str, request: GenerateRequest) -> Generation:
        """Send a turn of a session, which policies that hash sessions know by its header."""
        began = time.perf_counter()
        headers = {"Content-Type": "application/json", "X-SMG-Routing-Key": session, "X-Session-ID": session}
        content = dump_request(generate_body(request))
        async with http.post(f"{self.url}/generate", data=content, headers=headers) as answer:
            answer.raise_for_status()
            body = await answer.json(loads=orjson.loads)
        return parse_generation(
            body,
            request,
            backend_id=self._program,
            info=None,
            engine_seconds=time.perf_counter() - began,
        )

    def _server_command(self, folder: Path) -> ServerCommand:
        python = ENVIRONMENT / "bin" / "python"
        if not python.exists():
            raise EngineStartError(
                f"{self._program} is not installed",
                hint="Run scripts/install-routers, or use --peer none.",
            )
        module = f"{self._program.replace('-', '_')}.launch_router"
        command = [
            *(str(python), "-m", module, "--worker-urls", *self._workers),
            *("--policy", self._policy, "--host", "127.0.0.1", "--port", str(self._port)),
            *("--prometheus-port", str(self._metrics_port), "--log-level", "error"),
        ]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder)}
        return ServerCommand(command, environment, lambda: self._port)

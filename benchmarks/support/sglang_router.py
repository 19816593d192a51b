"""Runs sglang-router as a process; `scripts/install-sglang-router` installs it in a separate environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import anyio
import httpx

from rollout_service.inference.local_servers.process import EngineStartError, ServerCommand, ServerProcess
from sandboxes.host.ports import free_port

_POLL_SECONDS = 0.2
ENVIRONMENT = Path(__file__).parents[2] / ".venv-sglang-router"


class SGLangRouter(ServerProcess):
    """Routes to `workers` by `policy` while the context lasts, at `.url`. Its other settings are defaults.

    Raises:
        EngineStartError: The router is not installed or does not start; raised on entering.
    """

    def __init__(self, policy: str, workers: Sequence[str]) -> None:
        super().__init__()
        self._policy = policy
        self._workers = workers
        self._port, self._metrics_port = free_port(), free_port()

    async def until_ready(self) -> None:
        """Return once it sends requests to every worker, which is some time after it becomes healthy."""
        async with httpx.AsyncClient(base_url=self.url) as http:
            with anyio.fail_after(self.start_seconds):
                while True:
                    if await self._healthy_workers(http) == len(self._workers):
                        return
                    await anyio.sleep(_POLL_SECONDS)

    async def _healthy_workers(self, http: httpx.AsyncClient) -> int:
        try:
            workers = (await http.get("/workers")).json()["workers"]
        except httpx.TransportError:
            return 0
        return sum(worker["is_healthy"] for worker in workers)

    def _server_command(self, folder: Path) -> ServerCommand:
        python = ENVIRONMENT / "bin" / "python"
        if not python.exists():
            raise EngineStartError(
                "sglang-router is not installed",
                hint="Run scripts/install-sglang-router, or use --peer none.",
            )
        command = [
            *(str(python), "-m", "sglang_router.launch_router", "--worker-urls", *self._workers),
            *("--policy", self._policy, "--host", "127.0.0.1", "--port", str(self._port)),
            *("--prometheus-port", str(self._metrics_port), "--log-level", "error"),
        ]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder)}
        return ServerCommand(command, environment, lambda: self._port)

"""This service's E2B API alone, in front of any provider, with faults, for tests of the provider of E2B's API.

    python -m tests.support.e2b_server SETTINGS STATE

It prints its address. `POST /faults` takes `{"busy": N, "retry_after": S, "slow": S}`: the next N creations get a 429,
and each is answered so many seconds after it happened.
"""

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import uvicorn
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_service.http.keyring import ApiKey, Keyring
from rollout_service.server.e2b.app import E2BApp
from rollout_service.server.e2b.boxes import Boxes
from rollout_service.server.e2b.control import ControlApi
from rollout_service.settings.http import E2BApiSettings
from sandboxes import make_provider
from sandboxes.config import LimitDefaults, PressureConfig, ProviderConfig
from sandboxes.scheduling.admission import AdmissionController
from sandboxes.scheduling.host_metrics import HostReader
from sandboxes.scheduling.pressure import PressureController

KEY = "e2b_" + "0" * 40
CEILING = 64


class Faults:
    """An ASGI application that counts the requests of another, and fails some."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.faults = {"busy": 0, "retry_after": 0, "slow": 0.0}
        self.counts = {"refused": 0, "renewed": 0}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, is_post = scope["path"], scope["method"] == "POST"
        answer = self.app
        if path == "/faults":
            self.faults |= await Request(scope, receive).json() if is_post else {}
            answer = JSONResponse(self.counts)
        elif path.endswith("/timeout"):
            self.counts["renewed"] += 1
        elif path == "/v2/sandboxes" and is_post and self.faults["busy"] > 0:
            self.faults["busy"] -= 1
            self.counts["refused"] += 1
            headers = {"Retry-After": str(self.faults["retry_after"])}
            answer = JSONResponse({"code": 429, "message": "too many sandboxes"}, 429, headers)
        elif path == "/v2/sandboxes" and is_post:
            send = partial(self._send_late, send)
        await answer(scope, receive, send)

    async def _send_late(self, send: Send, message) -> None:
        if message["type"] == "http.response.start":
            await anyio.sleep(self.faults["slow"])
        await send(message)


@asynccontextmanager
async def app_for(config: ProviderConfig, state: Path) -> AsyncIterator[ASGIApp]:
    """Yield the API over a provider; its sandboxes end with the block."""
    provider, reader = make_provider(config, state), HostReader([state.parent])
    pressure = PressureController(PressureConfig(enabled=False), CEILING, reader.cpus)
    admission = AdmissionController(pressure, reader.read, ceiling=CEILING)
    settings = E2BApiSettings(network="full", max_sandboxes=CEILING)
    boxes = Boxes(settings, provider, admission, lambda: False)
    keyring = Keyring([ApiKey(name="tests", key=KEY)])
    try:
        async with boxes.running():
            yield Faults(E2BApp(boxes, keyring, ControlApi(boxes, LimitDefaults(), 1)))
    finally:
        await provider.close()


async def main() -> None:
    config = TypeAdapter(ProviderConfig).validate_json(sys.argv[1])
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    async with app_for(config, Path(sys.argv[2])) as app:
        options = {"log_level": "critical", "timeout_graceful_shutdown": 2, "lifespan": "off"}
        await uvicorn.Server(uvicorn.Config(app, **options)).serve([listener])


if __name__ == "__main__":
    anyio.run(main)

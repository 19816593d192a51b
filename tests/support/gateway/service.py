"""A service in this process whose policy is a scripted engine that writes Qwen3's format, and its gateway."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from pydantic import HttpUrl

from api_schemas.external import RolloutAccess
from api_schemas.inference import BackendSpec
from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_service.engines.shipped import policy_folder
from rollout_service.server.api.app import create_app
from rollout_service.settings import Settings
from rollout_service.testing import Replies, Reply, ScriptedEngine
from rollout_service.tokens import ChatRenderer
from sandboxes.config import LocalConfig

POLICY = policy_folder("calc-tuned")
END = "<|im_end|>"
CALC = Task(environment="calc", instance={"question": "1+1", "answer": "2"})


def scripted(*texts: str, **options: Any) -> ScriptedEngine:
    """Return an engine that answers with these texts, one after the other."""
    script = Replies.from_texts([f"{text}{END}" for text in texts], POLICY)
    return ScriptedEngine(script, model_path=POLICY, vocab_size=512, **options)


class OneAnswer:
    """A script of one text, which goes on where an interrupted prompt ends."""

    def __init__(self, text: str) -> None:
        self._ids = ChatRenderer.load(POLICY).encode(f"{text}{END}")

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        """Return what the prompt lacks of the text."""
        _ = budget
        done = next(n for n in range(len(self._ids), -1, -1) if list(input_ids[len(input_ids) - n :]) == self._ids[:n])
        return Reply(self._ids[done:])


@dataclass(frozen=True, slots=True)
class GatewayService:
    """A running service."""

    app: FastAPI
    client: RolloutClient

    def http(self, seconds: float = 30.0) -> httpx.AsyncClient:
        """Return a client that sends requests of a test's own."""
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=seconds)

    async def metrics(self) -> str:
        async with self.http() as http:
            return (await http.get("/metrics")).text

    async def begin(self, **fields: Any) -> RolloutAccess:
        """Submit a rollout for an external agent, and return its access."""
        request = RolloutRequest.model_validate({"task": CALC, "agent": "external", "rollout_id": "r"} | fields)
        rollout = await self.client.submit(request)
        async with self.http() as http:
            query = {"wait": 20, "until": "access"}
            shown = await http.get(f"/v1/rollouts/{rollout.rollout_id}", params=query)
        return RolloutAccess.model_validate(shown.json()["access"])

    async def end(self, rollout_id: str = "r", **report: Any) -> httpx.Response:
        """Report the end of an external agent."""
        async with self.http() as http:
            return await http.post(f"/v1/rollouts/{rollout_id}/end", json=report)


@asynccontextmanager
async def gateway_service(
    folder: Path, engines: Sequence[ScriptedEngine], **settings: Any
) -> AsyncIterator[GatewayService]:
    """Run a service with these engines, which are running."""
    given = {"state_dir": folder, "engine": "none", "sandbox": LocalConfig(provider="local")} | settings
    app = create_app(Settings(**given))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with RolloutClient("http://localhost", transport=transport, patience_seconds=0) as client:
            for engine in engines:
                await client.add_backend(BackendSpec(url=HttpUrl(engine.url)))
            yield GatewayService(app, client)

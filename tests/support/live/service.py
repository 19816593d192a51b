"""A service in this process that serves live sessions, and its users' agents."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from api_schemas.sessions import LiveSession, OpenedSession
from rollout_service.live.contract import TurnRecord
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.testing import ScriptedEngine
from tests.support.gateway.service import gateway_service
from tests.support.waiting import until


@dataclass(frozen=True, slots=True)
class LiveService:
    """A running service with live sessions."""

    app: FastAPI
    http: httpx.AsyncClient
    """Sends requests to the API."""
    gateway_url: str

    @property
    def store(self) -> SqliteLiveStore:
        """The store of its sessions."""
        store: SqliteLiveStore = self.app.state.service.live.store
        return store

    async def open(self, **fields: Any) -> OpenedSession:
        """Open a session whose user agrees to training, unless the fields say otherwise."""
        answer = await self.http.post("/v1/sessions", json={"train": True} | fields)
        assert answer.status_code == 200, answer.text
        return OpenedSession.model_validate(answer.json())

    async def ask(
        self, key: str | None, *contents: str, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """Send messages with the contents of user and assistant in turn to the gateway's Chat Completions."""
        assert key is not None, "a session that was open before does not show its key"
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]
        async with httpx.AsyncClient(base_url=self.gateway_url, timeout=30) as http:
            return await http.post(
                "/v1/chat/completions",
                json={"model": "policy", "messages": messages} | fields,
                headers={"authorization": f"Bearer {key}"} | (headers or {}),
            )

    async def show(self, session_id: str) -> LiveSession:
        """Return a session with its turns."""
        answer = await self.http.get(f"/v1/sessions/{session_id}")
        return LiveSession.model_validate(answer.json())

    async def turns(self, session_id: str) -> Sequence[TurnRecord]:
        """Return the stored turns of a session."""
        return await self.store.turns(session_id)


@asynccontextmanager
async def live_service(folder: Path, engines: Sequence[ScriptedEngine], **settings: Any) -> AsyncIterator[LiveService]:
    """Run a service with these engines, which are running."""
    async with gateway_service(folder, engines, **settings) as service, service.http() as http:
        url = service.app.state.service.live.sessions.engines.url
        yield LiveService(service.app, http, url)


def stored(folder: Path) -> bytes:
    """Return the bytes of all files of a service."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


async def delivered(service: LiveService, session_id: str, count: int) -> Sequence[TurnRecord]:
    """Wait until so many turns of a session were delivered, and return all."""

    async def look() -> Sequence[TurnRecord]:
        turns = await service.turns(session_id)
        return turns if sum(turn.delivered for turn in turns) >= count else ()

    return await until(look)

"""A gateway of one session in this process, without sockets, whose engine answers at once."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
from anyio.abc import TaskGroup
from prometheus_client import CollectorRegistry
from starlette.types import Message

from api_schemas.rollouts import Sampling, TokenExtras
from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import GenerateRequest, Generation, TokenSink
from rollout_service.episodes import EpisodeLimits
from rollout_service.gateway.capture import TurnCapture
from rollout_service.gateway.contract import Dialect
from rollout_service.gateway.dialects import ListedModel
from rollout_service.gateway.metrics import GatewayMetrics
from rollout_service.gateway.server.app import GatewayApp
from rollout_service.gateway.sessions.engines import PolicyEngines, StreamingGenerator
from rollout_service.gateway.sessions.keys import GatewaySessions
from rollout_service.gateway.sessions.session import GatewaySession, SessionPlace
from rollout_service.http.requests import BodiesInFlight
from rollout_service.settings.http import GatewaySettings
from rollout_service.tokens import ChatRenderer
from tests.support.samples import generation

CONTEXT = 4_096
PATHS: Mapping[Dialect, str] = {
    Dialect.CHAT: "/v1/chat/completions",
    Dialect.RESPONSES: "/v1/responses",
    Dialect.ANTHROPIC: "/v1/messages",
    Dialect.GOOGLE: "/v1beta/models/policy:generateContent",
}
COUNTS: Mapping[Dialect, str] = {
    Dialect.CHAT: "/tokenize",
    Dialect.RESPONSES: "/v1/responses/input_tokens",
    Dialect.ANTHROPIC: "/v1/messages/count_tokens",
    Dialect.GOOGLE: "/v1beta/models/policy:countTokens",
}
"""Where an API counts tokens."""


@dataclass(slots=True)
class ReadyEngine:
    """An engine that always samples the same; implements `gateway.sessions.sampling.StreamingGenerator`."""

    ids: list[int]
    requests: list[GenerateRequest] = field(default_factory=list)

    async def generate(
        self, request: GenerateRequest, *, affinity: str | None = None, on_tokens: TokenSink | None = None
    ) -> Generation:
        """Return the answer."""
        _ = affinity, on_tokens
        self.requests.append(request)
        await anyio.lowlevel.checkpoint()
        ids = self.ids[: request.sampling.max_new_tokens]
        finish = FinishReason.STOP if len(ids) == len(self.ids) else FinishReason.LENGTH
        return generation(ids, versions=[0] * len(ids), finish_reason=finish, prompt_tokens=len(request.input_ids))

    def release(self, affinity: str) -> None:
        """Free nothing."""


@dataclass(slots=True)
class GatewayBench:
    """The gateway, and a client of it."""

    app: GatewayApp
    session: GatewaySession
    engine: ReadyEngine
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any = None, *, content: bytes | None = None) -> httpx.Response:
        """Send a request with the session's key."""
        headers = {"authorization": f"Bearer {self.session.key}", "content-type": "application/json"}
        if content is None:
            return await self.http.post(path, json=body, headers=headers)
        return await self.http.post(path, content=content, headers=headers)

    async def ask_and_leave(self, path: str, content: bytes, left: anyio.Event) -> list[Message]:
        """Send a request whose client goes away at that event, and return what was sent to it."""
        sent: list[Message] = []
        body: Message | None = {"type": "http.request", "body": content, "more_body": False}

        async def receive() -> Message:
            nonlocal body
            if body is not None:
                message, body = body, None
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"authorization", f"Bearer {self.session.key}".encode())],
        }
        await self.app(scope, receive, send)
        return sent


def open_session(
    capture: Any,
    pool: StreamingGenerator,
    tasks: TaskGroup,
    *,
    limits: EpisodeLimits,
    metrics: GatewayMetrics,
    retry_seconds: float,
    context_length: int = CONTEXT,
    stop_token_ids: Sequence[int] = (),
    hidden: Collection[str] = (),
) -> GatewaySession:
    """Open a session without a gateway, which cannot be served alone."""
    engines = PolicyEngines(
        pool,
        affinity="r",
        context_length=context_length,
        stop_token_ids=stop_token_ids,
        sampling=Sampling(),
        exports=TokenExtras(),
    )
    place = SessionPlace(
        url="http://gateway",
        model=ListedModel("policy", context_length),
        serve=lambda *_: NotImplemented,
        tasks=tasks,
        metrics=metrics,
        retry_seconds=retry_seconds,
        hidden=hidden,
    )
    return GatewaySession(capture, engines, limits, place)


@asynccontextmanager
async def gateway_bench(
    renderer: ChatRenderer,
    limits: EpisodeLimits | None = None,
    bodies: BodiesInFlight | None = None,
    **settings: Any,
) -> AsyncIterator[GatewayBench]:
    """Serve one session until the block is left."""
    metrics, given = GatewayMetrics(CollectorRegistry()), GatewaySettings(**settings)
    engine = ReadyEngine([*renderer.encode("Yes."), renderer.stop_token_ids[0]])
    many = EpisodeLimits(max_turns=1_000_000, max_tokens=1_000_000_000)
    async with anyio.create_task_group() as tasks:
        session = open_session(
            TurnCapture(renderer),
            engine,
            tasks,
            limits=limits or many,
            metrics=metrics,
            stop_token_ids=renderer.stop_token_ids,
            retry_seconds=given.retry_seconds,
        )
        bodies = bodies or BodiesInFlight(given.max_bytes_in_flight, given.max_body_bytes)
        app = GatewayApp(GatewaySessions(session), given, metrics, bodies)
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as http:
            yield GatewayBench(app, session, engine, http)
        await session.end()
        tasks.cancel_scope.cancel()

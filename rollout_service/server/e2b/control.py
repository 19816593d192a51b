"""E2B's API for sandboxes. Unsupported requests are refused; a creation whose client goes away starts nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl, unquote

from pydantic import BaseModel, Field, TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout_service.base.errors import ConflictError, RequestError
from rollout_service.http.requests import CLIENT_CLOSED_REQUEST, cancel_on_disconnect
from rollout_service.server.e2b.boxes import DEFAULT_SECONDS, Box, Boxes, NewBox, RequestBody
from rollout_service.server.e2b.refusals import body_of
from sandboxes.config import LimitDefaults

ENVD_VERSION = "0.6.4"
"""The version of E2B's daemon whose protocol this is."""
MAX_PAGE, MAX_FORKS, MIB = 100, 20, 1024 * 1024
REFUSED = {
    "autoPause": "sandboxes are not paused at their end",
    "iam": "sandboxes have no identity",
    "mcp": "there is no gateway for MCP servers",
    "network": "the network of a sandbox is a setting of the service",
    "volumeMounts": "there are no volumes",
}
"""Fields of a creation that ask for what is not served here; empty ones do not."""
OBJECT = TypeAdapter(dict[str, Any])


class NewTime(RequestBody):
    timeout: int = Field(DEFAULT_SECONDS, ge=0)


class BoxPause(RequestBody):
    memory: bool = True


class BoxForks(RequestBody):
    timeout: int = Field(15, ge=1)
    count: int = Field(1, ge=1, le=MAX_FORKS)


class BoxQuery(BaseModel):
    limit: int = Field(MAX_PAGE, ge=1)
    before: int | None = Field(None, alias="nextToken")
    order: str = "desc"
    state: str = "running,paused"
    template: str | None = None
    metadata: str = ""
    started_after: datetime | None = Field(None, alias="startedAfter")

    def has(self, box: Box) -> bool:
        pairs = [(unquote(name), unquote(value)) for name, value in parse_qsl(self.metadata, True)]  # quoted twice
        return (
            all(box.new.metadata.get(name) == value for name, value in pairs)
            and box.state in self.state.split(",")
            and self.template in (None, box.new.template)
            and (self.started_after is None or box.began > _in_utc(self.started_after))
        )


def _in_utc(moment: datetime) -> datetime:
    """Treat a moment without a time zone as UTC."""
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


class ControlApi:
    def __init__(self, boxes: Boxes, limits: LimitDefaults, cpus: int) -> None:
        self._boxes = boxes
        self._size = {
            "cpuCount": int(limits.cpus or cpus),
            "memoryMB": limits.memory_bytes // MIB,
            "diskSizeMB": limits.disk_bytes // MIB,
        }

    def routes(self) -> list[Route]:
        """Return the routes; other paths below `/sandboxes/ID` are refused with a reason."""
        one = "/sandboxes/{id}"
        return [
            Route("/v2/sandboxes", self._create, methods=["POST"]),
            Route("/v2/sandboxes", self._list),
            Route(one, self._show),
            Route(one, self._kill, methods=["DELETE"]),
            Route(f"{one}/timeout", self._renew, methods=["POST"]),
            Route(f"/v2{one}/connect", self._connect, methods=["POST"]),
            Route(f"{one}/pause", self._pause, methods=["POST"]),
            Route(f"{one}/fork", self._fork, methods=["POST"]),
            Route(f"{one}/{{action}}", _refuse, methods=["GET", "POST", "PUT"]),
        ]

    async def _create(self, request: Request) -> Response:
        body = OBJECT.validate_json(await request.body())
        if asked := [f"{name}: {why}" for name, why in REFUSED.items() if body.get(name)]:
            raise RequestError("; ".join(asked), hint="Create the sandbox without it.")
        new = NewBox.model_validate(body)
        self._check_seconds(new.timeout)
        box = await cancel_on_disconnect(request.receive, lambda: self._boxes.create(_owner(request), new))
        return Response(status_code=CLIENT_CLOSED_REQUEST) if box is None else self._described(box, 201)

    async def _connect(self, request: Request) -> Response:
        """Tell how to reach a sandbox, which from now lives for at least the given time."""
        box, seconds = await self._box_and_seconds(request)
        box.renew(seconds if box.paused else max(seconds, box.seconds_left))
        await box.resume()
        return self._described(box)

    async def _renew(self, request: Request) -> Response:
        box, seconds = await self._box_and_seconds(request)
        box.renew(seconds)
        return Response(status_code=204)

    async def _pause(self, request: Request) -> Response:
        box = self._box(request)
        if not BoxPause.model_validate_json(await request.body() or b"{}").memory:
            raise RequestError("memory: a paused sandbox keeps its processes", hint="Leave out `mode`.")
        if box.paused:
            raise ConflictError("the sandbox is paused already")
        await box.pause()
        return Response(status_code=204)

    async def _fork(self, request: Request) -> Response:
        box, asked = self._box(request), BoxForks.model_validate_json(await request.body())
        self._check_seconds(asked.timeout)
        if box.paused:
            raise ConflictError("the sandbox is paused", hint="Connect to it first.")
        forks = await cancel_on_disconnect(request.receive, lambda: self._boxes.fork(box, asked.timeout, asked.count))
        if forks is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(
            [
                {"sandbox": self._view(fork) | _tokens(fork)} if isinstance(fork, Box) else {"error": body_of(fork)[1]}
                for fork in forks
            ],
            201,
        )

    async def _show(self, request: Request) -> Response:
        return self._described(self._box(request))

    async def _kill(self, request: Request) -> Response:
        await self._box(request).kill()
        return Response(status_code=204)

    async def _list(self, request: Request) -> Response:
        """List a page; its token is the number of the last sandbox on the page before."""
        page = BoxQuery.model_validate(dict(request.query_params))
        sign = 1 if page.order == "asc" else -1
        rows = [box for box in self._boxes.list(_owner(request))[::-sign] if page.has(box)]
        rows = [box for box in rows if page.before is None or sign * (box.number - page.before) > 0]
        shown = rows[: min(page.limit, MAX_PAGE)]
        headers = {"x-next-token": str(shown[-1].number)} if len(shown) < len(rows) else None
        return JSONResponse([self._view(box) for box in shown], headers=headers)

    async def _box_and_seconds(self, request: Request) -> tuple[Box, int]:
        box, time = self._box(request), NewTime.model_validate_json(await request.body())
        self._check_seconds(time.timeout)
        return box, time.timeout

    def _check_seconds(self, seconds: int) -> None:
        if seconds > (most := self._boxes.settings.max_seconds):
            raise RequestError(f"timeout: a sandbox lives for at most {most} s")

    def _box(self, request: Request) -> Box:
        return self._boxes.get(_owner(request), request.path_params["id"])

    def _described(self, box: Box, status: int = 200) -> Response:
        return JSONResponse(self._view(box) | _tokens(box), status)

    def _view(self, box: Box) -> dict[str, Any]:
        return {
            "sandboxID": box.sandbox.id,
            "templateID": box.new.template,
            "clientID": box.owner,
            "envdVersion": ENVD_VERSION,
            "startedAt": box.began.isoformat(),
            "endAt": (datetime.now(UTC) + timedelta(seconds=box.seconds_left)).isoformat(),
            "state": box.state,
            "metadata": box.new.metadata,
            **self._size,
        }


def _tokens(box: Box) -> dict[str, str]:
    # `e2b_code_interpreter` always sends its server the second one, and the first only sometimes.
    return {"envdAccessToken": box.token, "trafficAccessToken": box.token}


def _owner(request: Request) -> str:
    owner: str = request.scope["state"]["owner"]
    return owner


async def _refuse(request: Request) -> Response:
    raise RequestError(f"{request.path_params['action'][:64]!r} of sandboxes is not served here")

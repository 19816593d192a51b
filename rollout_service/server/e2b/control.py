"""E2B's API for sandboxes: creates, connects, lists, renews and kills those of the key that asks.

Guarantees: what cannot be had is refused with a reason, never left out in silence. A creation whose client goes away
starts nothing.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from api_schemas.errors import FieldError
from rollout_service.base.errors import InvalidFieldError, RequestError
from rollout_service.http.requests import cancel_on_disconnect
from rollout_service.server.e2b.boxes import Box, Boxes, WantedBox
from sandboxes.config import LimitDefaults

ENVD_VERSION = "0.6.4"
"""The version of E2B's daemon whose protocol is spoken here."""
DEFAULT_SECONDS, MAX_PAGE = 300, 100
MIB = 1024 * 1024

Text = Annotated[str, Field(max_length=4_096)]
Table = Annotated[dict[Annotated[str, Field(min_length=1, max_length=256)], Text], Field(max_length=128)]


class BoxRequest(BaseModel):
    """The body of a request for a sandbox."""

    model_config = ConfigDict(extra="ignore", strict=True)


class NewBox(BoxRequest):
    """The body of a creation."""

    template: str = Field(alias="templateID", min_length=1, max_length=512)
    timeout: int = Field(DEFAULT_SECONDS, ge=1)
    metadata: Table = {}
    env: Table = Field({}, alias="envVars")
    internet: bool | None = Field(None, alias="allow_internet_access")


class NewTime(BoxRequest):
    """The body of a connection, or of a renewal."""

    timeout: int = Field(DEFAULT_SECONDS, ge=0)


REFUSED = {
    "autoPause": "sandboxes are not paused at their end",
    "iam": "sandboxes have no identity",
    "mcp": "there is no gateway for MCP servers",
    "network": "the network of a sandbox is a setting of the service",
    "volumeMounts": "there are no volumes",
}
"""The fields of a creation that ask for what is not served here; empty ones do not."""


class ControlApi:
    """The routes of the API."""

    def __init__(self, boxes: Boxes, limits: LimitDefaults, cpus: int) -> None:
        """`limits` and `cpus` are those of each sandbox, for its description."""
        self._boxes = boxes
        self._limits = limits
        self._cpus = cpus

    def routes(self) -> list[Route]:
        """Return the routes; `/sandboxes/...` that are not served are refused with a reason."""
        one = "/sandboxes/{id}"
        return [
            Route("/v2/sandboxes", self._create, methods=["POST"]),
            Route("/v2/sandboxes", self._list),
            Route(one, self._show),
            Route(one, self._kill, methods=["DELETE"]),
            Route(f"{one}/timeout", self._renew, methods=["POST"]),
            Route(f"/v2{one}/connect", self._connect, methods=["POST"]),
            Route(f"{one}/{{action:path}}", _refuse, methods=["GET", "POST", "PUT", "DELETE"]),
        ]

    async def _create(self, request: Request) -> Response:
        body = await _read(request)
        asked = [f"{name}: {why}" for name, why in REFUSED.items() if body.get(name)]
        if asked:
            raise RequestError("; ".join(asked), hint="Create the sandbox without it.")
        new = NewBox.model_validate(body)
        self._check_seconds(new.timeout)
        wanted = WantedBox(new.template, new.timeout, new.metadata, new.env, new.internet)
        box = await cancel_on_disconnect(request.receive, lambda: self._boxes.create(_owner(request), wanted))
        return Response(status_code=499) if box is None else JSONResponse(self._with_token(box), 201)

    async def _connect(self, request: Request) -> Response:
        """Tell how to reach a sandbox, which then lives for at least the time that is asked for."""
        box, seconds = await self._box_and_seconds(request)
        box.renew(max(seconds, box.seconds_left))
        return JSONResponse(self._with_token(box))

    async def _renew(self, request: Request) -> Response:
        box, seconds = await self._box_and_seconds(request)
        box.renew(seconds)
        return Response(status_code=204)

    async def _show(self, request: Request) -> Response:
        return JSONResponse(self._with_token(self._box(request)))

    async def _kill(self, request: Request) -> Response:
        await self._boxes.kill(self._box(request))
        return Response(status_code=204)

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        limit, before = _number(query, "limit", MAX_PAGE), _number(query, "nextToken", None)
        rows = [box for box in self._boxes.list(_owner(request)) if _matches(box, query)]
        if query.get("order") == "asc":
            rows.reverse()
            rows = [box for box in rows if before is None or box.number > before]
        else:
            rows = [box for box in rows if before is None or box.number < before]
        page = rows[: min(limit or MAX_PAGE, MAX_PAGE)]
        headers = {"x-next-token": str(page[-1].number)} if len(page) < len(rows) else None
        return JSONResponse([self._view(box) for box in page], headers=headers)

    async def _box_and_seconds(self, request: Request) -> tuple[Box, int]:
        box = self._box(request)
        seconds = NewTime.model_validate(await _read(request)).timeout
        self._check_seconds(seconds)
        return box, seconds

    def _check_seconds(self, seconds: int) -> None:
        if seconds > (most := self._boxes.settings.max_seconds):
            raise _invalid("timeout", f"a sandbox lives for at most {most} s from now on")

    def _box(self, request: Request) -> Box:
        return self._boxes.get(_owner(request), request.path_params["id"])

    def _with_token(self, box: Box) -> dict[str, Any]:
        return {**self._view(box), "envdAccessToken": box.token}

    def _view(self, box: Box) -> dict[str, Any]:
        return {
            "sandboxID": box.sandbox.id,
            "templateID": box.wanted.template,
            "clientID": box.owner,
            "envdVersion": ENVD_VERSION,
            "startedAt": box.began.isoformat(),
            "endAt": box.ends.isoformat(),
            "cpuCount": int(self._limits.cpus or self._cpus),
            "memoryMB": self._limits.memory_bytes // MIB,
            "diskSizeMB": self._limits.disk_bytes // MIB,
            "state": "running",
            "metadata": dict(box.wanted.metadata),
        }


def _owner(request: Request) -> str:
    owner: str = request.scope["state"]["owner"]
    return owner


async def _read(request: Request) -> dict[str, Any]:
    """Return the body, an object; an empty one has no fields."""
    body: dict[str, Any] = _OBJECT.validate_json(await request.body() or b"{}")
    return body


_OBJECT = TypeAdapter(dict[str, Any])


def _invalid(path: str, message: str) -> InvalidFieldError:
    return InvalidFieldError([FieldError(path=path, message=message)])


def _number(query: Any, name: str, default: int | None) -> int | None:
    """Return a number of the query.

    Raises:
        InvalidFieldError: It is none.
    """
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise _invalid(name, "not a positive number")
    return int(text)


def _matches(box: Box, query: Any) -> bool:
    """Return whether a sandbox is one of those that a query asks for."""
    pairs = parse_qsl(query.get("metadata", ""))  # quoted twice
    if any(box.wanted.metadata.get(unquote(name)) != unquote(value) for name, value in pairs):
        return False
    if "running" not in query.get("state", "running").split(","):
        return False
    if query.get("template", box.wanted.template) != box.wanted.template:
        return False
    try:
        after = query.get("startedAfter")
        return after is None or box.began > datetime.fromisoformat(after)
    except (ValueError, TypeError):
        raise _invalid("startedAfter", "not a time with its zone") from None


async def _refuse(request: Request) -> Response:
    action = request.path_params["action"].rpartition("/")[2][:64]
    raise RequestError(
        f"{action!r} is not served here", hint="docs/how-to/serve-e2b-programs.md lists what is."
    )

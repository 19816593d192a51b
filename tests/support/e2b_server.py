"""A server that speaks E2B's API, for tests: the sandboxes of any provider, behind the real definition of the protocol.

    python -m tests.support.e2b_server SETTINGS STATE

It prints its address. The routes of processes are those that the package e2b generates from E2B's own definition. As in
E2B, commands belong to the sandbox and not to the request that started them, and a sandbox ends with its time. Every
user of a command is the sandbox's own. `POST /faults` takes `{"busy": N, "retry_after": S, "slow": S}`: the next N
creations get a 429, and each is answered so many seconds after it happened.
"""

import datetime
import secrets
import socket
import sys
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from sandboxes import RunningProgram, Sandbox, SandboxProvider, SandboxSpec, make_provider
from sandboxes.config import ProviderConfig
from sandboxes.errors import SandboxError

KEY = "e2b_" + "0" * 40
Event = process_pb.ProcessEvent


@dataclass(slots=True)
class Command:
    """A command, and what it has printed that nobody has taken."""

    program: RunningProgram
    events: "anyio.abc.ObjectReceiveStream[Event]"


@dataclass(slots=True)
class Box:
    """A sandbox of the server."""

    sandbox: Sandbox
    template: str
    metadata: dict[str, str]
    until: float
    began: datetime.datetime
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    commands: dict[int, Command] = field(default_factory=dict)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Server(process_connect.Process):
    """The control plane and the processes."""

    def __init__(self, provider: SandboxProvider) -> None:
        self.provider = provider
        self.boxes: dict[str, Box] = {}
        self.faults = {"busy": 0, "retry_after": 0, "slow": 0.0}
        self.refused = 0
        self.renewed = 0

    def app(self) -> Starlette:
        rpc = process_connect.ProcessASGIApplication(self)
        routes = [
            Route("/faults", self._set_faults, methods=["GET", "POST"]),
            Route("/health", self._health),
            Route("/v2/sandboxes", self._create, methods=["POST"]),
            Route("/v2/sandboxes", self._list),
            Route("/sandboxes/{id}", self._kill, methods=["DELETE"]),
            Route("/sandboxes/{id}/timeout", self._renew, methods=["POST"]),
            Mount("/", self._guarded(rpc)),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as self.tasks:
            yield
            self.tasks.cancel_scope.cancel()
        await self.provider.close()

    # The control plane.

    async def _set_faults(self, request: Request) -> Response:
        if request.method == "POST":
            self.faults |= await request.json()
        return JSONResponse({"refused": self.refused, "renewed": self.renewed})

    async def _create(self, request: Request) -> Response:
        if (refusal := _refuse(request)) is not None:
            return refusal
        if self.faults["busy"] > 0:
            self.faults["busy"] -= 1
            self.refused += 1
            headers = {"Retry-After": str(self.faults["retry_after"])}
            return JSONResponse({"code": 429, "message": "too many sandboxes"}, 429, headers)
        body = await request.json()
        if body["templateID"] != "base":
            return JSONResponse({"code": 404, "message": f"template {body['templateID']} not found"}, 404)
        network = "full" if body.get("allow_internet_access", True) else "none"
        sandbox = await self.provider.start(SandboxSpec(network=network, workdir="/workspace"))
        now = datetime.datetime.now(datetime.UTC)
        box = Box(sandbox, "base", body["metadata"], anyio.current_time() + body["timeout"], now)
        self.boxes[sandbox.id] = box
        self.tasks.start_soon(self._end_in_time, box)
        await anyio.sleep(self.faults["slow"])
        return JSONResponse({**self._view(box), "envdAccessToken": box.token}, 201)

    async def _end_in_time(self, box: Box) -> None:
        try:
            with box.scope:
                while anyio.current_time() < box.until:
                    await anyio.sleep(0.1)
        finally:
            self.boxes.pop(box.sandbox.id, None)
            await box.sandbox.close()

    def _view(self, box: Box) -> dict[str, object]:
        return {
            "sandboxID": box.sandbox.id,
            "templateID": box.template,
            "clientID": "test",
            "envdVersion": "0.6.4",
            "startedAt": box.began.isoformat(),
            "endAt": box.began.isoformat(),
            "cpuCount": 1,
            "memoryMB": 512,
            "diskSizeMB": 512,
            "state": "running",
            "metadata": box.metadata,
        }

    async def _list(self, request: Request) -> Response:
        if (refusal := _refuse(request)) is not None:
            return refusal
        wanted = dict(urllib.parse.parse_qsl(request.query_params.get("metadata", "")))
        wanted = {urllib.parse.unquote(key): urllib.parse.unquote(value) for key, value in wanted.items()}
        found = [box for box in self.boxes.values() if wanted.items() <= box.metadata.items()]
        return JSONResponse([self._view(box) for box in found])

    async def _kill(self, request: Request) -> Response:
        if (refusal := _refuse(request)) is not None:
            return refusal
        box = self.boxes.pop(request.path_params["id"], None)
        if box is None:
            return JSONResponse({"code": 404, "message": "sandbox not found"}, 404)
        box.scope.cancel()
        return Response(status_code=204)

    async def _renew(self, request: Request) -> Response:
        if (refusal := _refuse(request)) is not None:
            return refusal
        box = self.boxes.get(request.path_params["id"])
        if box is None:
            return JSONResponse({"code": 404, "message": "sandbox not found"}, 404)
        box.until = anyio.current_time() + (await request.json())["timeout"]
        self.renewed += 1
        return Response(status_code=204)

    # What E2B's proxy and the daemon inside answer.

    async def _health(self, request: Request) -> Response:
        if self.boxes.get(request.headers.get("e2b-sandbox-id", "")) is None:
            return JSONResponse({"code": 502, "message": "The sandbox was not found"}, 502)
        return Response(status_code=204)

    def _guarded(self, app):
        async def guarded(scope, receive, send) -> None:
            headers = dict(scope["headers"])
            box = self.boxes.get(headers.get(b"e2b-sandbox-id", b"").decode())
            answer = None
            if box is None:
                answer = JSONResponse({"code": 502, "message": "The sandbox was not found"}, 502)
            elif headers.get(b"x-access-token", b"").decode() != box.token:
                answer = JSONResponse({"code": 401, "message": "no access"}, 401)
            await (app if answer is None else answer)(scope, receive, send)

        return guarded

    def _box(self, ctx) -> Box:
        box = self.boxes.get(ctx.request_headers["e2b-sandbox-id"])
        if box is None:
            raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")
        return box

    def _command(self, request, ctx) -> Command:
        command = self._box(ctx).commands.get(request.process.selector.value)
        if command is None:
            raise ConnectError(Code.NOT_FOUND, "process not found")
        return command

    async def list(self, request, ctx):
        processes = [process_pb.ProcessInfo(pid=pid) for pid in self._box(ctx).commands]
        return process_pb.ListResponse(processes=processes)

    async def start(self, request, ctx) -> AsyncGenerator:
        box, pid = self._box(ctx), secrets.randbelow(1 << 30)
        config, events = request.process, anyio.create_memory_object_stream(16)
        ready = anyio.Event()
        self.tasks.start_soon(self._run, box, pid, config, events, ready)
        await ready.wait()
        yield process_pb.StartResponse(event=Event(event=Oneof("start", Event.StartEvent(pid=pid))))
        with suppress(anyio.ClosedResourceError):
            async for event in events[1]:
                yield process_pb.StartResponse(event=Event(event=event))
                if event.field == "end":
                    return
        raise ConnectError(
            Code.UNAVAILABLE, "the connection to the sandbox ended before the stream completed"
        )

    async def _run(self, box: Box, pid: int, config, events, ready: anyio.Event) -> None:
        """Run a command to its end; nobody has to listen."""
        sending, receiving = events
        argv = [config.cmd, *config.args]
        cwd = config.cwd if config.has_field("cwd") else None
        with sending, receiving, suppress(SandboxError):
            async with box.sandbox.program(argv, cwd=cwd, env=dict(config.envs)) as program:
                box.commands[pid] = Command(program, receiving)
                ready.set()
                while data := await program.receive():
                    await _tell(sending, Oneof("data", Event.DataEvent(output=Oneof("stdout", data))))
                code = await program.wait()
                if errors := program.errors().encode():
                    await _tell(sending, Oneof("data", Event.DataEvent(output=Oneof("stderr", errors))))
                end = Event.EndEvent(exit_code=code, exited=True, status=f"exit status {code}")
                await _tell(sending, Oneof("end", end))
                await anyio.sleep(0.5)  # the last events are taken
        ready.set()
        box.commands.pop(pid, None)

    async def send_input(self, request, ctx):
        await self._command(request, ctx).program.send(request.input.input.value)
        return process_pb.SendInputResponse()

    async def close_stdin(self, request, ctx):
        self._command(request, ctx).program.close_input()
        return process_pb.CloseStdinResponse()

    async def send_signal(self, request, ctx):
        self._command(request, ctx)
        raise ConnectError(Code.UNIMPLEMENTED, "this server sends no signals")


async def _tell(events, event) -> None:
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await events.send(event)


def _refuse(request: Request) -> Response | None:
    if request.headers.get("x-api-key") != KEY:
        return JSONResponse({"code": 401, "message": "Invalid API key"}, 401)
    return None


def main() -> None:
    config = TypeAdapter(ProviderConfig).validate_json(sys.argv[1])
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    app = Server(make_provider(config, Path(sys.argv[2]))).app()
    uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=2)).run([listener])


if __name__ == "__main__":
    main()

"""One session of an OpenEnv server: a WebSocket that resets an environment and steps through it.

Guarantees: the session is closed with its block, and its server gets a moment to end it; pings are sent and answered
while the policy thinks; an exchange has a deadline and an answer a largest size; redirects are not followed. An answer
is an observation or a typed error, never a guess.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import aiohttp
import anyio
import orjson
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from api_schemas.errors import Boundary
from rollout_service.base.errors import EnvironmentFailedError, ServiceError
from sandboxes.task_groups import open_task_group

CONNECT_SECONDS: Final = 15.0
PING_SECONDS: Final = 20.0
"""As OpenEnv's own client: proxies close connections that are idle for a minute or so, and a turn may take longer."""
CLOSE_SECONDS: Final = 5.0
"""A server that takes longer to end a session is left to find out by itself."""
MESSAGE_BYTES: Final = 4 * 1024 * 1024
ERROR_CHARS: Final = 1_000
SHOWN_ERRORS: Final = 8
_LOST: Final = (aiohttp.ClientError, OSError, TimeoutError)


class OpenEnvServerError(ServiceError):
    """The server cannot be reached, has no free session, or was lost."""

    code = "openenv_server_failed"
    boundary: ClassVar[Boundary] = Boundary.ENVIRONMENT
    retryable = True


class InvalidActionError(Exception):
    """The server refused an action; the session lives on, and the message is for the policy."""


@dataclass(frozen=True, slots=True)
class Observed:
    observation: dict[str, Any]
    reward: float | None
    done: bool


@dataclass(frozen=True, slots=True)
class OpenEnvServer:
    """Its methods, and those of its sessions, raise OpenEnvServerError if it cannot be reached, has no free session or
    was lost, and EnvironmentFailedError for any other mistake of the server or its environment.
    """

    url: str
    headers: Mapping[str, str]

    async def action_schema(self) -> dict[str, Any]:
        try:
            with anyio.fail_after(CONNECT_SECONDS):
                async with self._client() as client, client.get(f"{self.url.rstrip('/')}/schema") as response:
                    response.raise_for_status()
                    body = await _read_all(response)
        except _LOST as error:
            raise self._unreachable(error) from error
        try:
            schema = orjson.loads(body)["action"]
        except (ValueError, KeyError, TypeError):
            schema = None
        if not isinstance(schema, dict):
            raise EnvironmentFailedError(
                f"{self.url}/schema has no schema of an action",
                hint="See that the address is an OpenEnv server's.",
            )
        return schema

    @asynccontextmanager
    async def session(self) -> AsyncIterator[OpenEnvSession]:
        async with self._client() as client:
            try:
                with anyio.fail_after(CONNECT_SECONDS):
                    socket = await client.ws_connect(
                        f"{self.url.rstrip('/')}/ws",
                        max_msg_size=MESSAGE_BYTES,
                        timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),
                    )
            except _LOST as error:
                raise self._unreachable(error) from error
            try:
                async with open_task_group() as tasks:
                    arrived, answers = anyio.create_memory_object_stream[str](1)
                    with arrived, answers:
                        tasks.start_soon(_read, socket, arrived)
                        tasks.start_soon(_keep_alive, socket)
                        yield OpenEnvSession(self.url, socket, answers)
                        tasks.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    await _close(socket)

    def _client(self) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_refuse_redirect)
        timeout = aiohttp.ClientTimeout(total=None)
        return aiohttp.ClientSession(headers=self.headers, trace_configs=[trace], timeout=timeout)

    def _unreachable(self, error: Exception) -> OpenEnvServerError:
        return OpenEnvServerError(
            f"the OpenEnv server at {self.url} cannot be reached: {str(error) or type(error).__name__}",
            hint="See that it is up, and that `url` of the environment.toml is its address.",
        )


@dataclass(eq=False)
class OpenEnvSession:
    """`OpenEnvServer.session` opens one."""

    url: str
    socket: aiohttp.ClientWebSocketResponse
    answers: MemoryObjectReceiveStream[str]

    async def reset(self, arguments: Mapping[str, Any], seconds: float) -> Observed:
        try:
            return await self._ask("reset", arguments, seconds)
        except InvalidActionError as error:
            raise EnvironmentFailedError(
                f"the OpenEnv server at {self.url} refused to reset: {error}",
                hint="The instance's `seed` and `options` must be what the environment's `reset` takes.",
            ) from error

    async def step(self, action: Mapping[str, Any], seconds: float) -> Observed:
        """
        Raises:
            InvalidActionError: The server refused the action as written.
        """
        return await self._ask("step", action, seconds)

    async def _ask(self, kind: str, data: Mapping[str, Any], seconds: float) -> Observed:
        try:
            with anyio.fail_after(seconds):
                with suppress(*_LOST):  # a server that has closed the socket may have said why
                    await self.socket.send_str(json.dumps({"type": kind, "data": data}))
                text = await self.answers.receive()
        except TimeoutError as error:
            raise EnvironmentFailedError(
                f"the OpenEnv server at {self.url} gave no answer to a {kind} within {seconds:g} s",
                hint="Raise `init_seconds` (resets) or `tool_seconds` (steps) in [limits], or mend the environment.",
            ) from error
        except anyio.EndOfStream as error:
            raise OpenEnvServerError(
                f"the OpenEnv server at {self.url} ended the session without an answer to a {kind} "
                f"(close code {self.socket.close_code})",
                hint="Look at the server's log; it may have been stopped, or limit how long a session is idle.",
            ) from error
        return self._read(kind, text)

    def _read(self, kind: str, text: str) -> Observed:
        try:
            answer = orjson.loads(text)
            failure = _failure(self.url, kind, answer["data"]) if answer["type"] == "error" else None
            if failure is None:
                return _observed(answer)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EnvironmentFailedError(
                f"the OpenEnv server at {self.url} answered a {kind} with something else than an observation: {error}",
                hint="See that it speaks the protocol of OpenEnv 0.10.",
            ) from error
        raise failure


def _observed(answer: dict[str, Any]) -> Observed:
    data = answer["data"]
    observation, reward, done = data["observation"], data.get("reward"), data.get("done", False)
    if answer["type"] != "observation" or not isinstance(observation, dict) or not isinstance(done, bool):
        raise ValueError("it is of another type, or its `observation` or `done` is")
    if reward is None:
        return Observed(observation, None, done)
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"the reward {reward!r} is not a finite number")
    return Observed(observation, float(reward), done)


def _failure(url: str, kind: str, data: dict[str, Any]) -> Exception:
    code, message = str(data.get("code")), str(data.get("message"))[:ERROR_CHARS]
    match code:
        case "VALIDATION_ERROR":
            return InvalidActionError(_explain(data.get("errors")) or message)
        case "CAPACITY_REACHED":
            return OpenEnvServerError(
                f"the OpenEnv server at {url} has no free session: {message}",
                hint="Start it with more (`max_concurrent_envs`), or lower `sessions` in the environment.toml.",
            )
    return EnvironmentFailedError(
        f"the OpenEnv server at {url} failed in a {kind} ({code}): {message}",
        hint="The server's log has more about it.",
    )


def _explain(errors: Any) -> str:
    found = [one for one in errors if isinstance(one, dict)] if isinstance(errors, list) else []
    lines = (
        f"{'.'.join(map(str, one.get('loc') or ())) or 'action'}: {one.get('msg')}" for one in found[:SHOWN_ERRORS]
    )
    return "; ".join(lines)[:ERROR_CHARS]


async def _read_all(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > MESSAGE_BYTES:
            raise aiohttp.ClientError(f"its answer has more than {MESSAGE_BYTES} bytes")
    return bytes(body)


async def _read(socket: aiohttp.ClientWebSocketResponse, arrived: MemoryObjectSendStream[str]) -> None:
    """Reading also answers the server's pings."""
    with arrived:
        while (message := await socket.receive()).type is aiohttp.WSMsgType.TEXT:
            await arrived.send(message.data)


async def _keep_alive(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Send pings; none needs an answer in time, since a step may keep a server busy."""
    with suppress(*_LOST):
        while True:
            await anyio.sleep(PING_SECONDS)
            await socket.ping()


async def _close(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Ask the server to end the session, and wait until it has: its place is then free."""
    with suppress(*_LOST), anyio.move_on_after(CLOSE_SECONDS):
        await socket.send_str('{"type": "close"}')
        while (await socket.receive()).type is aiohttp.WSMsgType.TEXT:
            pass
    with suppress(*_LOST):
        await socket.close()


async def _refuse_redirect(_client: object, _context: object, params: aiohttp.TraceRequestRedirectParams) -> None:
    raise aiohttp.ClientError(f"it redirects {params.url}")

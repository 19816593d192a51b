"""An environment as a server of OpenEnv: `/ws` with an episode at a time, `/schema`, `/metadata`, `/health`.

An episode and its sandbox end with its connection, also in the middle of a step. No more sessions are open than
allowed. Web pages in a browser are refused; there is no other access control.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import anyio.to_thread
from aiohttp import WSMsgType, web
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from pydantic import JsonValue, ValidationError

from api_schemas.rollouts import Usage
from api_schemas.trajectories import ForkReason, Message, ToolCall, Trajectory
from rollout_service.authoring.openenv_messages import (
    EpisodeState,
    ResetData,
    SeenMessage,
    TurnAction,
    TurnObservation,
    failure,
    invalid,
    observation,
    schemas,
)
from rollout_service.base.errors import (
    ConfigurationError,
    EnvironmentFailedError,
    InvalidFieldError,
    ServiceError,
    describe,
)
from rollout_service.environments.contract import Environment
from rollout_service.environments.dataset_files import select_split
from rollout_service.episodes import PolicyTurn
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import NO_MODELS, OtherModels, Trial, play
from rollout_service.tokens import ToolSpec
from sandboxes.task_groups import open_task_group

MESSAGE_BYTES: Final = 16 * 1024 * 1024
CLOSE_SECONDS: Final = 2.0
"""How long a client may take to agree that its session is over."""
END_SECONDS: Final = 30.0
"""How long open sessions may close their sandboxes when the server stops."""


@dataclass(eq=False, slots=True)
class EnvironmentServer:
    """Serves an environment.

    Raises:
        ConfigurationError: Its agent is a program of its own.
    """

    environment: Environment
    dataset: Sequence[dict[str, JsonValue]]
    sandboxes: SandboxSource
    max_sessions: int
    models: OtherModels = NO_MODELS
    _sessions: set[anyio.CancelScope] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.environment.uses_gateway:
            name = self.environment.spec.name
            raise ConfigurationError(
                f"the agent of {name!r} is a program of its own, which a client of OpenEnv cannot be",
                hint="Serve an environment without a harness.",
            )

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve in the block, and yield the address; `port` 0 lets the kernel choose."""
        app, spec = web.Application(), self.environment.spec
        metadata = {"name": spec.name, "description": spec.description or spec.name}
        pages = {"/schema": schemas(), "/metadata": metadata, "/health": {"status": "healthy"}}
        app.add_routes([web.get(path, _page(value)) for path, value in pages.items()])
        app.router.add_get("/ws", self._connect)
        app.on_shutdown.append(self._end_sessions)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=END_SECONDS)
        await runner.setup()
        try:
            await _listen(runner, host, port)
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            with anyio.CancelScope(shield=True):
                await runner.cleanup()

    async def _end_sessions(self, _: web.Application) -> None:
        for scope in self._sessions:
            scope.cancel()

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        if "Origin" in request.headers:
            raise web.HTTPForbidden(text="web pages are refused")
        socket = web.WebSocketResponse(max_msg_size=MESSAGE_BYTES, timeout=CLOSE_SECONDS)
        await socket.prepare(request)
        if len(self._sessions) >= self.max_sessions:
            limits = {"active_sessions": len(self._sessions), "max_sessions": self.max_sessions}
            full = failure("CAPACITY_REACHED", f"all {self.max_sessions} sessions are taken", **limits)
            await socket.send_json(full)
        else:
            await self._serve(socket)
        await socket.close()
        return socket

    async def _serve(self, socket: web.WebSocketResponse) -> None:
        """Answer a client until it leaves; its messages and pings are read in the meantime."""
        async with open_task_group() as tasks:
            self._sessions.add(tasks.cancel_scope)
            try:
                session = _Session(self, tasks)
                sending, texts = anyio.create_memory_object_stream[str](1)
                with sending, texts, suppress(ConnectionError):  # a client may leave at any time
                    tasks.start_soon(_read, socket, sending, tasks.cancel_scope)
                    async for text in texts:
                        await socket.send_json(await session.answer(text))
            finally:
                self._sessions.discard(tasks.cancel_scope)


class _Session:
    def __init__(self, server: EnvironmentServer, tasks: TaskGroup) -> None:
        self._server = server
        self._tasks = tasks
        self._episode: RemoteEpisode | None = None

    async def answer(self, text: str) -> dict[str, Any]:
        try:
            message = _parse(text)
        except ValueError as error:
            return failure("INVALID_JSON", f"Invalid JSON: {error}")
        kind, data = message.get("type"), message.get("data", {})
        try:
            match kind:
                case "reset":
                    return await self._reset(ResetData.model_validate(data))
                case "step":
                    action = TurnAction.model_validate(data)
                    return OVER if self._episode is None else await self._episode.step(action)
                case "state":
                    state = self._episode.state.model_dump() if self._episode is not None else {}
                    return {"type": "state", "data": state}
        except ValidationError as error:
            return invalid(error)
        except InvalidFieldError as error:
            return invalid(error.fields)
        except Exception as error:  # noqa: BLE001 - the client gets any error of the environment
            return _error(error)
        return failure("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def _reset(self, data: ResetData) -> dict[str, Any]:
        instance = data.instance if data.instance is not None else self._choose(data)
        self._server.environment.check(instance)
        if self._episode is not None:
            await self._episode.end()
        self._episode = RemoteEpisode(self._server, instance, data.episode_id)
        self._tasks.start_soon(self._episode.run)
        return await self._episode.told()

    def _choose(self, data: ResetData) -> dict[str, JsonValue]:
        rows = self._server.dataset
        if data.split:
            rows = select_split(rows, data.split, field="split")
        index = data.index if data.index is not None else (data.seed or 0) % max(len(rows), 1)
        if index >= len(rows):
            message = f"there are {len(rows)} tasks, counted from 0; or give an `instance`"
            raise InvalidFieldError.at("index", message)
        return dict(rows[index])


async def _read(socket: web.WebSocketResponse, texts: MemoryObjectSendStream[str], session: anyio.CancelScope) -> None:
    """Pass texts on until the client leaves, which ends the session."""
    with texts:
        while (message := await socket.receive()).type is WSMsgType.TEXT:
            if _is_close(message.data):
                break
            await texts.send(message.data)
    session.cancel()


def _is_close(text: str) -> bool:
    try:
        return _parse(text).get("type") == "close"
    except ValueError:
        return False


def _parse(text: str) -> dict[str, Any]:
    """
    Raises:
        ValueError: The text is not JSON.
    """
    try:
        message = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return message if isinstance(message, dict) else {}


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error}", hint="Pass another --host or --port."
        ) from error


def _page(value: dict[str, Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def page(_: web.Request) -> web.Response:
        return web.json_response(value)

    return page


OVER: Final = failure("EXECUTION_ERROR", "no episode is under way; send a reset first")


class RemotePolicy:
    """Lets a client answer; implements `episodes.Policy`. Nothing is sampled here, so there are no token ids."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self.messages: list[Message] = []
        self.engine_seconds = 0.0
        self.usage = Usage()
        self._tools = list(tools)
        self._seen, self.seen = anyio.create_memory_object_stream[TurnObservation](1)
        self.act, self._actions = anyio.create_memory_object_stream[TurnAction](1)

    async def respond(self, new_messages: list[Message], *, max_tokens: int) -> PolicyTurn:  # noqa: ARG002
        self.messages += new_messages
        messages = [SeenMessage(role=message.role, content=message.content) for message in new_messages]
        tools = [] if self.usage.turns else [dict(tool) for tool in self._tools]
        await self._seen.send(TurnObservation(messages=messages, tools=tools))
        began = anyio.current_time()
        action = await self._actions.receive()
        self.engine_seconds += anyio.current_time() - began
        turn = self.usage.turns + 1
        calls = [
            ToolCall(id=f"call-{turn}-{number}", **dict(one), raw=json.dumps(one.model_dump(mode="json")))
            for number, one in enumerate(action.tool_calls, 1)
        ]
        self.usage = Usage(turns=turn, tool_calls=self.usage.tool_calls + len(calls))
        message = Message(role="assistant", content=action.text, tool_calls=calls)
        self.messages.append(message)
        return PolicyTurn(message=message, truncated=False, malformed=0)

    def close(self) -> None:
        """End both directions; idempotent."""
        for stream in (self._seen, self.seen, self.act, self._actions):
            stream.close()

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        self._tools = list(tools)

    def replace(
        self,
        messages: list[Message],  # noqa: ARG002 - it always refuses
        reason: ForkReason = ForkReason.HISTORY_EDITED,
    ) -> None:
        """Refuse: a client that keeps its own history cannot be told."""
        raise EnvironmentFailedError(f"this environment replaces the conversation ({reason}), which OpenEnv cannot")

    def trajectory(self) -> Trajectory:
        return Trajectory(segments=[], messages=list(self.messages), finish_reasons=[], fork_counts={})


class RemoteEpisode:
    """An episode from its reset on; `run` runs in a task group, and `step` is called meanwhile.

    The steps are those of a trial (`pipeline.trial`), which closes its sandbox however it ends. The client learns the
    reward only at the end; a failure is an error and never a reward.
    """

    def __init__(self, server: EnvironmentServer, instance: dict[str, JsonValue], episode_id: str | None) -> None:
        """`instance` is one that the environment accepts."""
        self._server = server
        self._instance = instance
        self._episode_id = episode_id
        self._policy = RemotePolicy(server.environment.for_instance(instance).tool_definitions())
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._outcome = OVER
        self._is_told = False
        self._steps = 0

    @property
    def state(self) -> EpisodeState:
        return EpisodeState(episode_id=self._episode_id, step_count=self._steps)

    async def run(self) -> None:
        """Play the episode; at its end, the outcome is set and the sandbox closed."""
        server = self._server
        limits = server.environment.for_instance(self._instance).spec.limits
        seconds = limits.init_seconds + limits.rollout_seconds + limits.evaluate_seconds
        try:
            with self._scope, anyio.fail_after(seconds):
                trial = await play(server.environment, self._instance, self._policy, server.sandboxes, server.models)
                self._outcome = _result(trial)
        except TimeoutError:
            self._outcome = failure("EXECUTION_ERROR", f"the episode took longer than {seconds:g} s")
        except Exception as error:  # noqa: BLE001 - the client gets any error of the environment
            self._outcome = _error(error)
        finally:
            self._ended.set()
            self._policy.close()

    async def step(self, action: TurnAction) -> dict[str, object]:
        if self._is_told:
            return OVER
        if not self._ended.is_set():  # a limit may have ended it since the last step
            self._steps += 1
            self._policy.act.send_nowait(action)
        return await self.told()

    async def told(self) -> dict[str, object]:
        try:
            return observation(await self._policy.seen.receive())
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            self._is_told = True
            return self._outcome

    async def end(self) -> None:
        self._scope.cancel()
        await self._ended.wait()


def _result(trial: Trial) -> dict[str, object]:
    score = trial.score
    metadata = {
        "stop_reason": trial.stop_reason.value,
        "reward_parts": dict(score.parts),
        "notes": list(trial.episode.notes),
    }
    return observation(TurnObservation(metadata=metadata), score.reward, done=True)


def _error(error: Exception) -> dict[str, object]:
    info = describe(error)
    hint = f" ({info.hint})" if isinstance(error, ServiceError) and info.hint else ""
    return failure("EXECUTION_ERROR", f"{info.code}: {info.message}{hint}")

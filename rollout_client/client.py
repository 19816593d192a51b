"""A typed, asynchronous client of the service, for trainers and for the command line.

Guarantees: every call may be sent twice without harm (a rollout without an id gets one here), so each is repeated with
back-off while the server cannot be reached or cannot take it, for at most `patience_seconds` from when that began;
`run_all` gives each rollout exactly once, through restarts of the server, planned ones and crashes alike.

The errors are those of `errors`, and can be imported from here.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import anyio
import httpx
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from pydantic import JsonValue, TypeAdapter
from typing_extensions import Self

from api_schemas.environments import EnvironmentView
from api_schemas.events import Event
from api_schemas.exports import ExportedSample, RecordedRollout, Rescored, RescoreRollouts, without_tokens
from api_schemas.inference import (
    AbortRequest,
    BackendSpec,
    BackendView,
    DiskWeights,
    DistributedWeights,
    PauseMode,
    PauseRequest,
    PoolOutcome,
    ResumeRequest,
    WeightsGroupRequest,
    WeightsRequest,
)
from api_schemas.nodes import NodeConcurrency, NodePatch, NodeView, Readiness
from api_schemas.rollouts import Rollout, RolloutPage, RolloutRequest, RolloutState
from api_schemas.runs import Run, RunPage, RunRequest
from api_schemas.sandboxes import SandboxView
from api_schemas.trajectories import Trajectory
from rollout_client._download import LargeBody, is_direct
from rollout_client._sse import SSEParser
from rollout_client.errors import (
    ClientError,
    ConflictError,
    GoneError,
    InvalidRequestError,
    NotFoundError,
    ProblemError,
    ProtocolError,
    UnauthorizedError,
    UnavailableError,
    UnreachableError,
    error_from,
    parse,
    readiness_from,
)
from rollout_client.runs import ClientRun, LeasedBatch, Receive, send_rescore

__all__ = [
    "ClientError",
    "ClientRun",
    "ConflictError",
    "GoneError",
    "InvalidRequestError",
    "LeasedBatch",
    "NotFoundError",
    "ProblemError",
    "ProtocolError",
    "RolloutClient",
    "UnauthorizedError",
    "UnavailableError",
    "UnreachableError",
    "with_id",
]

T = TypeVar("T")
Body = dict[str, Any] | None
Refused = Callable[[RolloutRequest, "ProblemError"], None]

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
ORDER_SECONDS = 1_800.0
"""For orders that go to every engine, such as loading weights."""
LONG_POLL_SECONDS = 30.0
FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 5.0
RESCORED_AT_ONCE = 8
"""Rollouts in one request: their messages are in its body."""
SILENCE_SECONDS = 60.0
"""A stream of events that says nothing for so long, not even a comment, is taken for dead and opened anew."""


class RolloutClient:
    """The service at one address. Use it as `async with RolloutClient(url, key) as client`.

    `patience_seconds` is how long a call is repeated once the server cannot be reached, or says that it cannot take
    it now (408, 429, 502, 503, 504), as when it is restarted; 0 asks once. `ca_file` holds certificates to trust, in
    PEM, beside the usual ones: for a server whose certificate is your own.
    """

    def __init__(
        self,
        base_url: str,
        key: str | None = None,
        *,
        patience_seconds: float = 60.0,
        ca_file: str | Path | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.patience_seconds = patience_seconds
        self._context = httpx.create_ssl_context()
        if ca_file is not None:
            self._context.load_verify_locations(cafile=ca_file)
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            transport=transport,
            verify=self._context,
        )
        self._direct = transport is None and is_direct(self._http.base_url)
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            tasks.cancel_scope.cancel()
            # The body's own exception is kept from the group, which would wrap it in an ExceptionGroup.
            await tasks.__aexit__(None, None, None)
        with anyio.CancelScope(shield=True):
            await self._http.__aexit__(kind, error, trace)

    async def aclose(self) -> None:
        """Close the connections of a client whose calls were used without `async with`."""
        await self._http.aclose()

    # -- rollouts --------------------------------------------------------------

    async def submit(self, request: RolloutRequest, *, wait_seconds: float = 0.0) -> Rollout:
        """Order a rollout; durable when this returns. Waits up to `wait_seconds` for it to end.

        A finished one comes with its trajectory. Raises InvalidRequestError, ConflictError (this id with
        another body) and the errors of every call.
        """
        body = with_id(request).model_dump(mode="json", exclude_defaults=True)
        params = {"wait": f"{wait_seconds:g}"} if wait_seconds > 0 else None
        return await self._call(
            Rollout, "POST", "/v1/rollouts", body, params=params, seconds=ANSWER_SECONDS + wait_seconds
        )

    async def get(self, rollout_id: str, *, trajectory: bool = False) -> Rollout:
        """A rollout as it stands. Raises NotFoundError."""
        params = {"trajectory": "true"} if trajectory else None
        return await self._call(Rollout, "GET", f"/v1/rollouts/{rollout_id}", params=params)

    async def wait(self, rollout_id: str, *, timeout_seconds: float | None = None) -> Rollout:
        """The rollout with its trajectory once it has ended. Raises TimeoutError, NotFoundError."""
        params = {"trajectory": "true", "wait": f"{LONG_POLL_SECONDS:g}"}
        seconds = ANSWER_SECONDS + LONG_POLL_SECONDS
        with anyio.fail_after(timeout_seconds):
            while True:
                path = f"/v1/rollouts/{rollout_id}"
                rollout = await self._call(Rollout, "GET", path, params=params, seconds=seconds)
                if rollout.state.terminal:
                    return rollout

    async def run(self, request: RolloutRequest) -> Rollout:
        """Request a rollout and wait for the result, through restarts of the server."""
        request = with_id(request)
        while True:
            rollout = await self.submit(request, wait_seconds=LONG_POLL_SECONDS)
            if rollout.state.terminal:
                return rollout

    async def run_all(
        self, requests: Iterable[RolloutRequest], *, concurrency: int = 64, refused: Refused | None = None
    ) -> AsyncGenerator[Rollout]:
        """Order these rollouts, at most `concurrency` at once; gives each with its trajectory when it ends.

        The requests are read as they are needed. One that the server refuses goes to `refused`; without it
        the error is raised here and no more are ordered, as with any other error. Leaving the loop early lets
        the server finish what was ordered; the results stay there.
        """
        if self._tasks is None:
            raise RuntimeError("open the client first: async with RolloutClient(...) as client")
        results, answers = anyio.create_memory_object_stream[Rollout | Exception](0)
        scope = anyio.CancelScope()
        self._tasks.start_soon(self._run_workers, scope, iter(requests), results, concurrency, refused)
        try:
            async for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            scope.cancel()
            answers.close()

    async def _run_workers(
        self,
        scope: anyio.CancelScope,
        queue: Iterator[RolloutRequest],
        results: MemoryObjectSendStream[Rollout | Exception],
        concurrency: int,
        refused: Refused | None,
    ) -> None:
        async def work() -> None:
            try:
                for request in queue:
                    if (rollout := await self._run_unless_refused(request, refused)) is not None:
                        await results.send(rollout)
            except Exception as error:  # noqa: BLE001 - nothing is hidden: the caller's loop raises it
                await results.send(error)

        with scope:
            async with results, anyio.create_task_group() as workers:
                for _ in range(concurrency):
                    workers.start_soon(work)

    async def _run_unless_refused(self, request: RolloutRequest, refused: Refused | None) -> Rollout | None:
        try:
            return await self.run(request)
        except (InvalidRequestError, NotFoundError, ConflictError) as error:
            if refused is None:
                raise
            refused(request, error)
            return None

    async def cancel(self, rollout_id: str) -> RolloutState | None:
        """Ask for a rollout to be cancelled; returns the state that it was in.

        None: it is not known yet, and cancelled when it comes.
        """
        answer = await self._call(dict[str, str | None], "DELETE", f"/v1/rollouts/{rollout_id}")
        was = answer.get("was")
        return None if was is None else RolloutState(was)

    async def trajectory(self, rollout_id: str) -> Trajectory:
        """The trajectory of a finished rollout. Raises NotFoundError."""
        return await self._call(Trajectory, "GET", f"/v1/rollouts/{rollout_id}/trajectory")

    async def page(
        self, *, state: RolloutState | None = None, cursor: str | None = None, limit: int = 100
    ) -> RolloutPage:
        """One page of rollouts, oldest first, with the number of rollouts in each state."""
        given = {"state": state, "cursor": cursor, "limit": str(limit)}
        params = {name: value for name, value in given.items() if value is not None}
        return await self._call(RolloutPage, "GET", "/v1/rollouts", params=params)

    async def rollouts(self, *, state: RolloutState | None = None) -> AsyncGenerator[Rollout]:
        """All rollouts, oldest first, without trajectories."""
        cursor: str | None = None
        while True:
            page = await self.page(state=state, cursor=cursor)
            for rollout in page.rollouts:
                yield rollout
            if (cursor := page.next_cursor) is None:
                return

    # -- runs ------------------------------------------------------------------

    async def create_run(self, request: RunRequest) -> ClientRun:
        """Create a run, or take up the one of this id; durable when this returns.

        Raises InvalidRequestError, ConflictError (this id with another body) and the errors of every call.
        """
        if request.run_id is None:
            request = request.model_copy(update={"run_id": uuid.uuid4().hex})
        body = request.model_dump(mode="json", exclude_defaults=True)
        body["source"] = request.source.model_dump(mode="json")
        run = await self._call(Run, "POST", "/v1/runs", body)
        return self.open_run(run.run_id)

    def open_run(self, run_id: str) -> ClientRun:
        """A run that exists."""
        return ClientRun(run_id, self._send, None if self._tasks is None else self._tasks.start_soon)

    async def runs(self) -> list[Run]:
        """All runs, oldest first."""
        return (await self._call(RunPage, "GET", "/v1/runs")).runs

    async def rescore(
        self,
        recorded: Iterable[ExportedSample | RecordedRollout],
        *,
        environment: str | None = None,
        replay: Literal["needed", "always"] = "needed",
    ) -> AsyncGenerator[Rescored]:
        """Have rollouts evaluated again that are at hand, as `run_export.RunExport(path).samples()`."""
        rollouts = (
            without_tokens(one.request, one.sample.rollout) if isinstance(one, ExportedSample) else one
            for one in recorded
        )
        while part := list(islice(rollouts, RESCORED_AT_ONCE)):
            order = RescoreRollouts(rollouts=part, environment=environment, replay=replay)
            for one in await send_rescore(self._send, "/v1/rescore", order):
                yield one

    # -- engines ---------------------------------------------------------------

    async def backends(self) -> list[BackendView]:
        """The engines that are registered."""
        return await self._call(list[BackendView], "GET", "/v1/backends")

    async def add_backend(self, backend: BackendSpec) -> BackendView:
        """Register an engine; it is asked for its model first."""
        return await self._call(BackendView, "POST", "/v1/backends", backend.model_dump(mode="json"))

    async def remove_backend(self, backend_id: str) -> None:
        """Take an engine out at once; its requests go on elsewhere. Raises NotFoundError."""
        await self._call(None, "DELETE", _backend(backend_id))

    async def drain_backend(self, backend_id: str) -> BackendView:
        """Give an engine nothing new; it finishes what it has. Raises NotFoundError."""
        return await self._call(BackendView, "POST", f"{_backend(backend_id)}/drain")

    async def update_weights(
        self,
        weights: str | DiskWeights | DistributedWeights,
        version: int,
        *,
        pool: str = "policy",
        mode: PauseMode = PauseMode.ABORT,
        force: bool = False,
    ) -> PoolOutcome:
        """Load new weights into every engine of a pool: from a folder that the engines can read, or from a process
        group that they have joined.

        When this returns, every engine in service has them; `changed` is False if they had them before. Raises
        WeightsError when engines refused or failed, and ConflictError for an older version.
        """
        source = DiskWeights(path=weights) if isinstance(weights, str) else weights
        order = WeightsRequest(source=source, version=version, pool=pool, mode=mode, force=force)
        return await self._order("/v1/weights", order.model_dump(mode="json"))

    async def join_weights_group(self, group: WeightsGroupRequest) -> PoolOutcome:
        """Let the engines of a pool join a process group; join it yourself at the same time. Raises OrderError."""
        return await self._order("/v1/weights/group", group.model_dump(mode="json"))

    async def pause(self, *, pool: str = "policy", mode: PauseMode = PauseMode.ABORT) -> PoolOutcome:
        """Pause the generation of a pool. Raises OrderError when an engine did not obey."""
        return await self._order("/v1/pause", PauseRequest(pool=pool, mode=mode).model_dump(mode="json"))

    async def resume(self, *, pool: str = "policy") -> PoolOutcome:
        """Let a paused pool go on. Raises OrderError when an engine did not obey."""
        return await self._order("/v1/resume", ResumeRequest(pool=pool).model_dump(mode="json"))

    async def abort(self, rollout_ids: list[str] | None = None) -> dict[str, JsonValue]:
        """Cancel these rollouts, or all that have not ended; says which or how many were."""
        body = AbortRequest(rollout_ids=rollout_ids).model_dump(mode="json")
        return await self._call(dict[str, JsonValue], "POST", "/v1/abort", body)

    async def _order(self, path: str, body: Body) -> PoolOutcome:
        return await self._call(PoolOutcome, "POST", path, body, seconds=ORDER_SECONDS)

    # -- the service -----------------------------------------------------------

    async def environments(self) -> list[EnvironmentView]:
        """Return the environments that tasks can name."""
        return await self._call(list[EnvironmentView], "GET", "/v1/environments")

    async def dataset(
        self, environment: str, *, limit: int = 1_000, offset: int = 0, split: str | None = None
    ) -> list[dict[str, JsonValue]]:
        """Return instances that ship with an environment, those of one split if it is named.

        Raises InvalidRequestError for an environment or a split that is not there.
        """
        params = {"limit": str(limit), "offset": str(offset)}
        params |= {} if split is None else {"split": split}
        path = f"/v1/environments/{environment}/dataset"
        return await self._call(list[dict[str, JsonValue]], "GET", path, params=params)

    async def sandboxes(self) -> list[SandboxView]:
        """Return the sandboxes that are alive."""
        return await self._call(list[SandboxView], "GET", "/v1/sandboxes")

    async def nodes(self) -> list[NodeView]:
        """The hosts that run sandboxes: how many each bears, why not more, and what its sandboxes did."""
        return await self._call(list[NodeView], "GET", "/v1/nodes")

    async def node(self) -> NodeConcurrency:
        """How much the service does at once."""
        return await self._call(NodeConcurrency, "GET", "/v1/node")

    async def update_node(self, patch: NodePatch) -> NodeConcurrency:
        """Change how much the service does at once, until its next start; work under way goes on."""
        body = patch.model_dump(mode="json", exclude_none=True)
        return await self._call(NodeConcurrency, "PATCH", "/v1/node", body)

    async def ready(self) -> None:
        """Returns when the service can take work; within this client's patience it waits for that."""
        await self._call(None, "GET", "/ready")

    async def readiness(self) -> Readiness:
        """Return whether the service can take work now, and if not, why. Asks once.

        What answers in the service's place, such as a proxy or a service that shuts down, counts as a reason too.
        Raises UnreachableError, and the other errors of an answer that says nothing of readiness.
        """
        try:
            response = await self._http.get("/ready")
        except httpx.TransportError as error:
            raise UnreachableError(f"{self.base_url} does not answer: {error}") from error
        return readiness_from(response)

    async def events(self, *, after: int | None = None) -> AsyncGenerator[Event]:
        """Yield events as they happen, without end; from `after` on when it is given, each once and in order.

        A lost connection is resumed after the last event seen or, before the first, where the server began.
        Close it with `contextlib.aclosing`.
        """
        last, patience = after, self._patience()
        while True:
            try:
                async for reached, events in self._event_stream(last):
                    patience = self._patience()
                    for event in events:
                        last = event.event_id
                        yield event
                    last = reached if last is None else last
            except (httpx.TransportError, UnavailableError) as error:
                await patience.wait(error)

    async def _event_stream(self, after: int | None) -> AsyncGenerator[tuple[int | None, list[Event]]]:
        """Yield, for each piece that arrives, the last id that the stream has named and the events in the piece.

        A piece may hold no event: a comment, which shows that the server is there, or the id that the stream starts at.
        """
        headers = {"accept": "text/event-stream"} | ({} if after is None else {"last-event-id": str(after)})
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        async with self._http.stream("GET", "/v1/events", headers=headers, timeout=timeout) as response:
            if not response.is_success:
                await response.aread()
                raise error_from(response)
            parser = SSEParser()
            async for chunk in response.aiter_bytes():
                events = [parse(TypeAdapter(Event), item.data.encode()) for item in parser.feed(chunk)]
                yield int(parser.last_id) if parser.last_id.isdecimal() else None, events
        raise httpx.RemoteProtocolError("the server ended the stream")

    # -- calls -----------------------------------------------------------------

    async def _call(
        self,
        model: type[T] | None,
        method: str,
        path: str,
        body: Body = None,
        *,
        params: dict[str, str] | None = None,
        seconds: float = ANSWER_SECONDS,
    ) -> T:
        response = await self._send(method, path, body, params=params, seconds=seconds)
        return parse(TypeAdapter(Any if model is None else model), response.content or b"null")

    async def _send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: dict[str, str] | None = None,
        seconds: float = ANSWER_SECONDS,
        headers: dict[str, str] | None = None,
        receive: Receive | None = None,
        into: LargeBody | None = None,
    ) -> httpx.Response:
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        request = self._http.build_request(
            method, path, json=body, params=params, headers=headers, timeout=timeout
        )
        patience = self._patience()
        while True:
            try:
                if into is not None and self._direct:
                    response = await into.fetch(
                        request, connect_seconds=CONNECT_SECONDS, seconds=seconds, context=self._context
                    )
                else:
                    response = await self._received(request, into.receive if into is not None else receive)
                if not response.is_success:
                    raise error_from(response)
            except (httpx.TransportError, UnavailableError) as error:
                await patience.wait(error)
            else:
                return response

    async def _received(self, request: httpx.Request, receive: Receive | None) -> httpx.Response:
        response = await self._http.send(request, stream=True)
        try:
            whole = receive if receive is not None and response.is_success else httpx.Response.aread
            await whole(response)
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()
        return response

    def _patience(self) -> _Patience:
        return _Patience(self.base_url, self.patience_seconds)


class _Patience:
    """How long one call is repeated, with pauses that double up to a limit and are drawn at random.

    It is counted from the first failure: a call may have waited long, and well, before the server went away.
    """

    def __init__(self, address: str, seconds: float) -> None:
        self._address = address
        self._seconds = seconds
        self._deadline: float | None = None
        self._pause = FIRST_BACKOFF_SECONDS

    async def wait(self, error: httpx.TransportError | UnavailableError) -> None:
        """Pause before the next try, or raise what is to be raised when the time is up."""
        now = anyio.current_time()
        if self._deadline is None:
            self._deadline = now + self._seconds
        left = self._deadline - now
        if left <= 0:
            if isinstance(error, UnavailableError):
                raise error
            reason = str(error) or type(error).__name__
            raise UnreachableError(f"no answer from {self._address}: {reason}") from error
        pause = random.uniform(0.5, 1.0) * self._pause  # noqa: S311 - spreads clients, keeps no secret
        if isinstance(error, UnavailableError):
            pause = max(pause, random.uniform(1.0, 1.5) * error.retry_after)  # noqa: S311 - the same
        self._pause = min(2.0 * self._pause, LAST_BACKOFF_SECONDS)
        await anyio.sleep(min(pause, left))


def _backend(backend_id: str) -> str:
    """Return the path of a backend, whose id holds the path of its engine's address."""
    return f"/v1/backends/{quote(backend_id, safe='/:@')}"


def with_id(request: RolloutRequest) -> RolloutRequest:
    """The request with an id, so that sending it twice orders one rollout."""
    if request.rollout_id is not None:
        return request
    return request.model_copy(update={"rollout_id": uuid.uuid4().hex})

"""A typed, asynchronous client of the service, for trainers and for the command line.

Every call may be sent twice without harm, so it is repeated with back-off while the server cannot be reached or cannot
take it, for at most `patience_seconds`. `run_all` gives each rollout exactly once, through planned restarts of the
server and through crashes.

Every call may raise the errors of `errors`, which can be imported from here too; docstrings name those that a caller
may want to handle.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import anyio

from rollout_client import _wire as wire
from rollout_client.calls.engines import EngineCalls
from rollout_client.calls.lists import ListCalls, ViewCalls
from rollout_client.calls.rollouts import RolloutCalls
from rollout_client.calls.rollouts import with_id as with_id
from rollout_client.calls.service import ServiceCalls
from rollout_client.calls.sessions import SessionCalls
from rollout_client.errors import AddressError as AddressError
from rollout_client.errors import CaFileError as CaFileError
from rollout_client.errors import ClientError as ClientError
from rollout_client.errors import ConflictError as ConflictError
from rollout_client.errors import GoneError as GoneError
from rollout_client.errors import InvalidRequestError as InvalidRequestError
from rollout_client.errors import KeyFormatError as KeyFormatError
from rollout_client.errors import NotFoundError as NotFoundError
from rollout_client.errors import ProblemError as ProblemError
from rollout_client.errors import ProtocolError as ProtocolError
from rollout_client.errors import ProxySettingsError as ProxySettingsError
from rollout_client.errors import UnauthorizedError as UnauthorizedError
from rollout_client.errors import UnavailableError as UnavailableError
from rollout_client.errors import UnreachableError as UnreachableError
from rollout_client.runs import ClientRun as ClientRun
from rollout_client.runs import LeasedBatch as LeasedBatch
from rollout_client.runs import send_rescore

if TYPE_CHECKING:
    import httpx
    from anyio.abc import TaskGroup
    from anyio.streams.memory import MemoryObjectSendStream
    from typing_extensions import Self

    Run = Callable[[wire.RolloutRequest], Awaitable[wire.Rollout]]
    Refused = Callable[[wire.RolloutRequest, ProblemError], None]
    """Takes a request that the server refuses, with its reason."""


RESCORED_AT_ONCE = 8
"""The number of rollouts in one request, whose body holds their messages."""


class RolloutClient(RolloutCalls, EngineCalls, ServiceCalls, SessionCalls, ListCalls, ViewCalls):
    """The service at one address. Use it as `async with RolloutClient(url, key) as client`.

    `patience_seconds` is how long a call is repeated while the server cannot be reached or cannot take it now (408,
    429, 504, or a 502 or 503 that may pass), as during a restart; 0 tries once. `ca_file` is a PEM file of certificates
    to trust in addition to the system's, for a server whose certificate your own authority issued.
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
        """Create a client of the service at an address; on this machine, it does not use the environment's proxy.

        Raises:
            AddressError: `base_url` does not begin with http:// or https:// and a host.
            KeyFormatError: `key` has characters that no key has.
            CaFileError: `ca_file` cannot be used.
            ProxySettingsError: The proxy that the environment names for it cannot be used.
        """
        from rollout_client._connection import Connection

        self._connection = Connection(
            base_url, key, patience_seconds=patience_seconds, ca_file=ca_file, transport=transport
        )
        self._tasks: TaskGroup | None = None

    @property
    def base_url(self) -> str:
        """The address of the service, without a slash at the end."""
        return self._connection.base_url

    @property
    def patience_seconds(self) -> float:
        """How long a call is repeated."""
        return self._connection.patience_seconds

    @patience_seconds.setter
    def patience_seconds(self, seconds: float) -> None:
        self._connection.patience_seconds = seconds

    async def __aenter__(self) -> Self:
        await self._connection.http.__aenter__()
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
            await self._connection.http.__aexit__(kind, error, trace)

    async def aclose(self) -> None:
        """Close the connections of a client that was used without `async with`."""
        await self._connection.http.aclose()

    def run_all(
        self,
        requests: Iterable[wire.RolloutRequest],
        *,
        concurrency: int = 64,
        refused: Refused | None = None,
    ) -> AsyncGenerator[wire.Rollout]:
        """Run these rollouts, at most `concurrency` at once, and yield each with its trajectory when it ends.

        Requests are read as they are needed. A request that the server refuses goes to `refused`; without `refused` the
        error is raised here and nothing more is submitted, as with any other error. If you leave the loop early, the
        server finishes the submitted rollouts and keeps the results.

        Raises:
            RuntimeError: The client is not open, or is closed before the last rollout has ended.
            ValueError: `concurrency` is below 1.
        """
        if self._tasks is None:
            raise RuntimeError("open the client first: async with RolloutClient(...) as client")
        if concurrency < 1:
            raise ValueError("no rollout can begin with a concurrency below 1")
        return _run_all(self.run, self._tasks, iter(requests), concurrency, refused)

    async def create_run(self, request: wire.RunRequest) -> ClientRun:
        """Create a run, or open the one with this id. It is durable when this returns.

        Raises:
            InvalidRequestError: The request cannot be carried out as it is.
            ConflictError: The id was used with another body.
        """
        if request.run_id is None:
            request = request.model_copy(update={"run_id": uuid.uuid4().hex})
        body = request.model_dump(mode="json", exclude_defaults=True)
        body["source"] = request.source.model_dump(mode="json")
        run = await self._connection.call(wire.Run, "POST", "/v1/runs", body)
        return self.open_run(run.run_id)

    def open_run(self, run_id: str) -> ClientRun:
        """Return a run that exists, without asking the server."""
        return ClientRun(run_id, self._connection, None if self._tasks is None else self._tasks.start_soon)

    async def runs(self) -> list[wire.Run]:
        """Return all runs, oldest first."""
        return (await self._connection.call(wire.RunPage, "GET", "/v1/runs")).runs

    async def rescore(
        self,
        recorded: Iterable[wire.ExportedSample | wire.RecordedRollout],
        *,
        environment: str | None = None,
        replay: Literal["needed", "always"] = "needed",
    ) -> AsyncGenerator[wire.Rescored]:
        """Have rollouts that you hold scored again, such as `RunExport(path).samples()`, and yield the results."""
        rollouts = (
            wire.without_tokens(one.request, one.sample.rollout) if isinstance(one, wire.ExportedSample) else one
            for one in recorded
        )
        while part := list(islice(rollouts, RESCORED_AT_ONCE)):
            order = wire.RescoreRollouts(rollouts=part, environment=environment, replay=replay)
            for one in await send_rescore(self._connection, "/v1/rescore", order):
                yield one

    def events(
        self,
        *,
        after: int | str | None = None,
        kinds: Sequence[str] = (),
        subjects: Sequence[str] = (),
        follow: bool = True,
    ) -> AsyncGenerator[wire.Event]:
        """Yield events as they happen, without end; from `after` on when it is given, each once and in order.

        `kinds` and `subjects` choose among them. Without `follow`, it ends after those that there are by now. A lost
        connection is resumed where the stream had come to. Close it with `contextlib.aclosing`.

        Raises:
            InvalidRequestError: There is no such kind.
        """
        from rollout_client._events import follow_events

        query = {"kind": kinds, "subject": subjects}
        return follow_events(self._connection, query, after=after, follow=follow)


async def _run_all(
    run: Run,
    tasks: TaskGroup,
    requests: Iterator[wire.RolloutRequest],
    concurrency: int,
    refused: Refused | None,
) -> AsyncGenerator[wire.Rollout]:
    """Yield the results of `run` as they come; workers in `tasks` call it until the generator is closed."""
    results, answers = anyio.create_memory_object_stream[wire.Rollout | Exception](0)
    scope, done = anyio.CancelScope(), anyio.Event()
    tasks.start_soon(_run_workers, scope, run, requests, results, concurrency, refused, done)
    try:
        async for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            yield answer
        if not done.is_set():
            raise RuntimeError("the client was closed before all rollouts had ended; the server keeps their results")
    finally:
        scope.cancel()
        answers.close()


async def _run_workers(
    scope: anyio.CancelScope,
    run: Run,
    requests: Iterator[wire.RolloutRequest],
    results: MemoryObjectSendStream[wire.Rollout | Exception],
    concurrency: int,
    refused: Refused | None,
    done: anyio.Event,
) -> None:
    async def work() -> None:
        try:
            for request in requests:
                if (rollout := await _run_unless_refused(run, request, refused)) is not None:
                    await results.send(rollout)
        except Exception as error:  # noqa: BLE001 - the caller's loop raises it
            await results.send(error)

    with scope:
        async with results:
            async with anyio.create_task_group() as workers:
                for _ in range(concurrency):
                    workers.start_soon(work)
            done.set()


async def _run_unless_refused(run: Run, request: wire.RolloutRequest, refused: Refused | None) -> wire.Rollout | None:
    try:
        return await run(request)
    except (InvalidRequestError, NotFoundError, ConflictError) as error:
        if refused is None:
            raise
        refused(request, error)
        return None

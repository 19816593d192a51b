"""The blocking client: the calls of `client`, for code that is not asynchronous.

Every call is the asynchronous client's own, with its signature and types, run by an event loop in a thread while the
client is open; retries and reconnections are the same. Ctrl-C ends a waiting call. No thread is left when the `with`
block ends.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, update_wrapper
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar

from rollout_client import _wire as wire
from rollout_client.arrays import BatchArrays
from rollout_client.client import RolloutClient, with_id
from rollout_client.external import AnthropicOptions, ExternalRollout, GoogleOptions, OpenAIOptions
from rollout_client.runs import LEASE_SECONDS, ClientRun, LeasedBatch

if TYPE_CHECKING:
    import httpx
    from anyio.from_thread import BlockingPortal
    from typing_extensions import Self

P = ParamSpec("P")
T = TypeVar("T")
A_co = TypeVar("A_co", covariant=True)

LOOK_SECONDS = 0.2
"""How often a waiting call checks for an interrupt: one just before a thread blocks does not wake it."""


class Blocking(Generic[A_co]):
    """An asynchronous object, and the thread that runs its calls."""

    _held: tuple[A_co, BlockingPortal, int] | None = None
    """The last one is the process, since one that is forked off has no such thread, and would wait forever."""

    def __init__(self, wrapped: A_co, portal: BlockingPortal) -> None:
        self._held = wrapped, portal, os.getpid()

    def _open(self) -> tuple[A_co, BlockingPortal]:
        if self._held is None:
            raise RuntimeError("open the client first: with SyncRolloutClient(...) as client")
        wrapped, portal, process = self._held
        if process != os.getpid():
            raise RuntimeError("the client was opened in the process that forked this one; open another here")
        return wrapped, portal

    @property
    def _wrapped(self) -> A_co:
        return self._open()[0]

    @property
    def _portal(self) -> BlockingPortal:
        return self._open()[1]


def blocking(
    method: Callable[Concatenate[A_co, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[Blocking[A_co], P], T]:
    """Return a method that calls this one and waits for its result."""

    def call(self: Blocking[A_co], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _wait(self._portal, partial(method, self._wrapped, *args, **kwargs))

    update_wrapper(call, method)
    return call


def iterating(
    method: Callable[Concatenate[A_co, P], AsyncGenerator[T]],
) -> Callable[Concatenate[Blocking[A_co], P], Iterator[T]]:
    """Return a blocking method that iterates over the items of this one.

    The event loop's thread reads iterables among the arguments, so these should not block for long.
    """

    def iterate(self: Blocking[A_co], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return _iterate(self._portal, method(self._wrapped, *args, **kwargs))

    update_wrapper(iterate, method)
    return iterate


def _wait(portal: BlockingPortal, call: Callable[[], Coroutine[object, object, T]]) -> T:
    future = portal.start_task_soon(call)
    try:
        while not concurrent.futures.wait([future], LOOK_SECONDS).done:
            pass
        return future.result()
    except BaseException:
        future.cancel()  # the waiting thread was interrupted; this has no effect on a call that has failed
        raise


def _iterate(portal: BlockingPortal, values: AsyncGenerator[T]) -> Iterator[T]:
    async def following() -> tuple[T, ...]:
        async for value in values:
            return (value,)
        return ()

    try:
        while value := _wait(portal, following):
            yield from value
    finally:
        with suppress(RuntimeError):  # the client was closed first, which ends the iteration too
            _wait(portal, values.aclose)


class SyncBatch(Blocking[LeasedBatch]):
    """A batch that this client holds; see `LeasedBatch`."""

    ack = blocking(LeasedBatch.ack)
    renew = blocking(LeasedBatch.renew)
    nack = blocking(LeasedBatch.nack)

    @property
    def content(self) -> bytes | bytearray:
        """The response body: JSON, or a safetensors file."""
        return self._wrapped.content

    @property
    def batch(self) -> wire.Batch:
        """The parsed batch, without its tokens if it came as arrays."""
        return self._wrapped.batch

    @property
    def arrays(self) -> BatchArrays | None:
        """The tokens, if they were requested as arrays."""
        return self._wrapped.arrays

    @property
    def batch_id(self) -> str:
        return self._wrapped.batch_id

    @property
    def groups(self) -> Sequence[wire.Group]:
        return self._wrapped.groups

    @property
    def settled(self) -> bool:
        """Whether it was acknowledged or given back."""
        return self._wrapped.settled


class SyncRun(Blocking[ClientRun]):
    """A run at a server; see `ClientRun`."""

    view = blocking(ClientRun.view)
    append = blocking(ClientRun.append)
    group_page = blocking(ClientRun.group_page)
    groups = iterating(ClientRun.groups)
    history = blocking(ClientRun.history)
    patch = blocking(ClientRun.patch)
    pause = blocking(ClientRun.pause)
    resume = blocking(ClientRun.resume)
    end = blocking(ClientRun.end)
    set_version = blocking(ClientRun.set_version)
    export = blocking(ClientRun.export)
    rescore = blocking(ClientRun.rescore)
    settle = blocking(ClientRun.settle)

    @property
    def run_id(self) -> str:
        return self._wrapped.run_id

    def lease(
        self,
        *,
        timeout_seconds: float | None = None,
        lease_seconds: float = LEASE_SECONDS,
        allow_stale: bool = False,
        arrays: bool = False,
    ) -> SyncBatch | None:
        """Return the next batch; None if there is none in time.

        Raises:
            GoneError: The run is over and every batch is acknowledged.
        """
        lease = partial(
            self._wrapped.lease,
            timeout_seconds=timeout_seconds,
            lease_seconds=lease_seconds,
            allow_stale=allow_stale,
            arrays=arrays,
        )
        leased = _wait(self._portal, lease)
        return None if leased is None else SyncBatch(leased, self._portal)

    def batches(self, *, lease_seconds: float = LEASE_SECONDS, arrays: bool = False) -> Iterator[SyncBatch]:
        """Yield batches until the run is over; each is acknowledged when the loop asks for the next."""
        for leased in _iterate(self._portal, self._wrapped.batches(lease_seconds=lease_seconds, arrays=arrays)):
            yield SyncBatch(leased, self._portal)


class SyncExternalRollout(Blocking[ExternalRollout]):
    """A rollout that the caller's program works on; see `ExternalRollout`."""

    end = blocking(ExternalRollout.end)
    result = blocking(ExternalRollout.result)

    @property
    def rollout_id(self) -> str:
        return self._wrapped.rollout_id

    @property
    def task(self) -> wire.Task:
        return self._wrapped.task

    @property
    def model(self) -> str:
        return self._wrapped.model

    @property
    def openai(self) -> OpenAIOptions:
        return self._wrapped.openai

    @property
    def anthropic(self) -> AnthropicOptions:
        return self._wrapped.anthropic

    @property
    def google(self) -> GoogleOptions:
        return self._wrapped.google


class SyncRolloutClient(Blocking[RolloutClient]):
    """The service at one address. Use it as `with SyncRolloutClient(url, key) as client`; see `RolloutClient`."""

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
        self._patience_seconds = patience_seconds
        self._make = partial(RolloutClient, base_url, key, ca_file=ca_file, transport=transport)
        self._stack = ExitStack()

    @property
    def patience_seconds(self) -> float:
        """How long a call is repeated."""
        return self._patience_seconds

    @patience_seconds.setter
    def patience_seconds(self, seconds: float) -> None:
        self._patience_seconds = seconds
        if self._held is not None:
            self._wrapped.patience_seconds = seconds

    def __enter__(self) -> Self:
        from anyio.from_thread import start_blocking_portal

        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            client = portal.call(partial(self._make, patience_seconds=self._patience_seconds))
            super().__init__(stack.enter_context(portal.wrap_async_context_manager(client)), portal)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    submit = blocking(RolloutClient.submit)
    get = blocking(RolloutClient.get)
    wait = blocking(RolloutClient.wait)
    run = blocking(RolloutClient.run)
    run_all = iterating(RolloutClient.run_all)
    cancel = blocking(RolloutClient.cancel)
    trajectory = blocking(RolloutClient.trajectory)
    steps = blocking(RolloutClient.steps)
    run_steps = iterating(RolloutClient.run_steps)
    step_lines = iterating(RolloutClient.step_lines)
    rollout_nodes = blocking(RolloutClient.rollout_nodes)
    rollout_node = blocking(RolloutClient.rollout_node)
    page = blocking(RolloutClient.page)
    rollouts = iterating(RolloutClient.rollouts)
    summary_page = blocking(RolloutClient.summary_page)
    summaries = iterating(RolloutClient.summaries)
    runs = blocking(RolloutClient.runs)
    rescore = iterating(RolloutClient.rescore)

    backends = blocking(RolloutClient.backends)
    add_backend = blocking(RolloutClient.add_backend)
    remove_backend = blocking(RolloutClient.remove_backend)
    renew_backend = blocking(RolloutClient.renew_backend)
    drain_backend = blocking(RolloutClient.drain_backend)
    update_weights = blocking(RolloutClient.update_weights)
    join_weights_group = blocking(RolloutClient.join_weights_group)
    pause = blocking(RolloutClient.pause)
    resume = blocking(RolloutClient.resume)
    abort = blocking(RolloutClient.abort)

    open_session = blocking(RolloutClient.open_session)
    session = blocking(RolloutClient.session)
    session_page = blocking(RolloutClient.session_page)
    sessions = iterating(RolloutClient.sessions)
    end_session = blocking(RolloutClient.end_session)
    feedback = blocking(RolloutClient.feedback)
    delete_session = blocking(RolloutClient.delete_session)
    delete_sessions = blocking(RolloutClient.delete_sessions)
    feedback_by_version = blocking(RolloutClient.feedback_by_version)
    canaries = blocking(RolloutClient.canaries)
    set_canary = blocking(RolloutClient.set_canary)
    remove_canary = blocking(RolloutClient.remove_canary)

    environments = blocking(RolloutClient.environments)
    dataset = blocking(RolloutClient.dataset)
    sandboxes = blocking(RolloutClient.sandboxes)
    nodes = blocking(RolloutClient.nodes)
    overview = blocking(RolloutClient.overview)
    outline = blocking(RolloutClient.outline)
    tokens = blocking(RolloutClient.tokens)
    saved_page = blocking(RolloutClient.saved_page)
    hangs = blocking(RolloutClient.hangs)
    activity = blocking(RolloutClient.activity)
    drain_node = blocking(RolloutClient.drain_node)
    resume_node = blocking(RolloutClient.resume_node)
    remove_node = blocking(RolloutClient.remove_node)
    node = blocking(RolloutClient.node)
    update_node = blocking(RolloutClient.update_node)
    ready = blocking(RolloutClient.ready)
    readiness = blocking(RolloutClient.readiness)
    events = iterating(RolloutClient.events)

    @contextmanager
    def external_rollout(self, request: wire.RolloutRequest) -> Iterator[SyncExternalRollout]:
        """Begin a rollout whose agent is the program in the block; see `RolloutClient.external_rollout`."""
        request, is_begun = with_id(request), False
        try:
            with self._portal.wrap_async_context_manager(self._wrapped.external_rollout(request)) as rollout:
                is_begun = True
                yield SyncExternalRollout(rollout, self._portal)
        except KeyboardInterrupt:
            if not is_begun:  # the event loop's thread, which was not interrupted, still waits
                self.cancel(str(request.rollout_id))
            raise

    def create_run(self, request: wire.RunRequest) -> SyncRun:
        """Create a run, or open the one with this id. It is durable when this returns."""
        return SyncRun(_wait(self._portal, partial(self._wrapped.create_run, request)), self._portal)

    def open_run(self, run_id: str) -> SyncRun:
        """Return a run that exists."""
        return SyncRun(self._wrapped.open_run(run_id), self._portal)

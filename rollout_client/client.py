"""A typed, asynchronous client of the service, for trainers and for the command line.

Guarantees: every call may be sent twice without harm (a rollout without an id gets one here), so a call is repeated
with back-off while the server cannot be reached or cannot take it, for at most `patience_seconds`. `run_all` gives each
rollout exactly once, through planned restarts of the server and through crashes.

Every call may raise the errors of `errors`, which can be imported from here too; docstrings name those that a caller
may want to handle.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import anyio

from rollout_client import _wire as wire
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
)
from rollout_client.lists import ListCalls
from rollout_client.runs import ClientRun, LeasedBatch, send_rescore
from rollout_client.sessions import SessionCalls
from rollout_client.views import ViewCalls

if TYPE_CHECKING:
    import httpx
    from anyio.abc import TaskGroup
    from typing_extensions import Self

    from rollout_client._run_all import Refused
    from rollout_client.external import ExternalRollout

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


ORDER_SECONDS = 1_800.0
"""The limit for requests that go to every engine, such as loading weights."""
LONG_POLL_SECONDS = 30.0
RESCORED_AT_ONCE = 8
"""The number of rollouts in one request, whose body holds their messages."""


class RolloutClient(SessionCalls, ListCalls, ViewCalls):
    """The service at one address. Use it as `async with RolloutClient(url, key) as client`.

    `patience_seconds` is how long a call is repeated while the server cannot be reached or cannot take it now (408,
    429, 502, 503, 504), as during a restart; 0 tries once. `ca_file` is a PEM file of certificates to trust in addition
    to the system's, for a server whose certificate your own authority issued.
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

    # -- rollouts --------------------------------------------------------------

    async def submit(self, request: wire.RolloutRequest, *, wait_seconds: float = 0.0) -> wire.Rollout:
        """Submit a rollout, and wait up to `wait_seconds` for it to end. It is durable when this returns.

        A finished rollout comes with its trajectory.

        Raises:
            InvalidRequestError: The request cannot be carried out as it is.
            ConflictError: The id was used with another body.
        """
        body = with_id(request).model_dump(mode="json", exclude_defaults=True)
        params = {"wait": f"{wait_seconds:g}"} if wait_seconds > 0 else None
        return await self._connection.call(
            wire.Rollout, "POST", "/v1/rollouts", body, params=params, wait_seconds=wait_seconds
        )

    async def get(self, rollout_id: str, *, trajectory: bool = False) -> wire.Rollout:
        """Return a rollout in its present state.

        Raises:
            NotFoundError: There is no such rollout.
        """
        params = {"trajectory": "true"} if trajectory else None
        return await self._connection.call(wire.Rollout, "GET", f"/v1/rollouts/{rollout_id}", params=params)

    async def wait(self, rollout_id: str, *, timeout_seconds: float | None = None) -> wire.Rollout:
        """Return a rollout with its trajectory once it has ended.

        Raises:
            TimeoutError: The rollout has not ended in time.
            NotFoundError: There is no such rollout.
        """
        params = {"trajectory": "true", "wait": f"{LONG_POLL_SECONDS:g}"}
        with anyio.fail_after(timeout_seconds):
            while True:
                path = f"/v1/rollouts/{rollout_id}"
                rollout = await self._connection.call(
                    wire.Rollout, "GET", path, params=params, wait_seconds=LONG_POLL_SECONDS
                )
                if rollout.state.terminal:
                    return rollout

    async def run(self, request: wire.RolloutRequest) -> wire.Rollout:
        """Request a rollout and wait for the result, through restarts of the server."""
        request = with_id(request)
        while True:
            rollout = await self.submit(request, wait_seconds=LONG_POLL_SECONDS)
            if rollout.state.terminal:
                return rollout

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
        server finishes what was submitted and keeps the results.

        Raises:
            RuntimeError: The client is not open.
        """
        if self._tasks is None:
            raise RuntimeError("open the client first: async with RolloutClient(...) as client")
        from rollout_client._run_all import run_all

        return run_all(self.run, self._tasks, iter(requests), concurrency, refused)

    def external_rollout(self, request: wire.RolloutRequest) -> AbstractAsyncContextManager[ExternalRollout]:
        """Begin a rollout whose agent is the program in the block: `async with client.external_rollout(...) as r`.

        The block begins when the policy may be called, as with `OpenAI(**r.openai)`. Report the reward with
        `r.end(reward)`. Without that, leaving the block has the environment score the outcome, and an exception
        fails the rollout. `await r.result()` then waits for the trajectory.

        Raises:
            InvalidRequestError: The request cannot be carried out as it is.
            RolloutOverError: The rollout ended before its program began.
        """
        from rollout_client.external import open_external

        return open_external(self._connection, with_id(request))

    async def cancel(self, rollout_id: str) -> wire.RolloutState | None:
        """Cancel a rollout, and return the state that it was in.

        None means that the server does not know it yet: it is cancelled if it arrives.
        """
        answer = await self._connection.call(dict[str, str | None], "DELETE", f"/v1/rollouts/{rollout_id}")
        was = answer.get("was")
        return None if was is None else wire.RolloutState(was)

    async def trajectory(self, rollout_id: str) -> wire.Trajectory:
        """Return the trajectory of a finished rollout.

        Raises:
            NotFoundError: There is no such rollout, or it has no trajectory.
        """
        return await self._connection.call(wire.Trajectory, "GET", f"/v1/rollouts/{rollout_id}/trajectory")

    async def rollout_nodes(self, rollout_id: str) -> wire.RolloutNodes:
        """Return the sub-agents of a finished rollout without trajectories, and how the work was divided among them.

        Raises:
            NotFoundError: There is no such rollout, or it has not ended.
        """
        return await self._connection.call(wire.RolloutNodes, "GET", f"/v1/rollouts/{rollout_id}/nodes")

    async def rollout_node(self, rollout_id: str, number: int) -> wire.AgentNode:
        """Return a sub-agent of a finished rollout, with its trajectory if that was asked for.

        `number` is the one at the end of its `node_id`.

        Raises:
            NotFoundError: There is no such rollout or sub-agent, or the rollout has not ended.
        """
        return await self._connection.call(wire.AgentNode, "GET", f"/v1/rollouts/{rollout_id}/nodes/{number}")

    async def steps(self, rollout_id: str) -> wire.RolloutSteps:
        """Return what a rollout did and waited for so far, over all its attempts.

        Raises:
            NotFoundError: There is no such rollout.
        """
        return await self._connection.call(wire.RolloutSteps, "GET", f"/v1/rollouts/{rollout_id}/steps")

    async def run_steps(self, run_id: str) -> AsyncGenerator[wire.RolloutAttempts]:
        """Yield the steps of the rollouts of a run as columns, a rollout at a time; those without steps are left out.

        Raises:
            NotFoundError: There is no such run.
        """
        from rollout_client._answers import parse

        async for line in self.step_lines(run=run_id):
            yield parse(wire.RolloutAttempts, line)

    async def step_lines(
        self, *, run: str | None = None, rollouts: Sequence[str] = ()
    ) -> AsyncGenerator[bytes]:
        """Yield the steps of the rollouts of a run, or of these, as they are sent: a JSON document for each rollout.

        Raises:
            NotFoundError: There is no such run.
        """
        params = [("run", run)] if run is not None else [("rollout", name) for name in rollouts]
        async for line in self._connection.lines("/v1/steps", params):
            yield line

    async def page(
        self, *, state: wire.RolloutState | None = None, cursor: str | None = None, limit: int = 100
    ) -> wire.RolloutPage:
        """Return a page of rollouts, oldest first, with the number of rollouts in each state."""
        given = {"state": state, "cursor": cursor, "limit": str(limit)}
        params = {name: value for name, value in given.items() if value is not None}
        return await self._connection.call(wire.RolloutPage, "GET", "/v1/rollouts", params=params)

    async def rollouts(self, *, state: wire.RolloutState | None = None) -> AsyncGenerator[wire.Rollout]:
        """Yield all rollouts, oldest first, without trajectories and sub-agents."""
        cursor: str | None = None
        while True:
            page = await self.page(state=state, cursor=cursor)
            for rollout in page.rollouts:
                yield rollout
            if (cursor := page.next_cursor) is None:
                return

    # -- runs ------------------------------------------------------------------

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
            wire.without_tokens(one.request, one.sample.rollout)
            if isinstance(one, wire.ExportedSample)
            else one
            for one in recorded
        )
        while part := list(islice(rollouts, RESCORED_AT_ONCE)):
            order = wire.RescoreRollouts(rollouts=part, environment=environment, replay=replay)
            for one in await send_rescore(self._connection, "/v1/rescore", order):
                yield one

    # -- engines ---------------------------------------------------------------

    async def backends(self) -> list[wire.BackendView]:
        """Return the registered engines."""
        return await self._connection.call(list[wire.BackendView], "GET", "/v1/backends")

    async def add_backend(self, backend: wire.BackendSpec) -> wire.BackendView:
        """Register an engine, after asking it for its model."""
        return await self._connection.call(
            wire.BackendView, "POST", "/v1/backends", backend.model_dump(mode="json")
        )

    async def remove_backend(self, backend_id: str) -> None:
        """Remove an engine at once; its requests continue elsewhere.

        Raises:
            NotFoundError: There is no such engine.
        """
        await self._connection.call(None, "DELETE", _backend(backend_id))

    async def drain_backend(self, backend_id: str) -> wire.BackendView:
        """Send an engine no new requests; it finishes those that it has.

        Raises:
            NotFoundError: There is no such engine.
        """
        return await self._connection.call(wire.BackendView, "POST", f"{_backend(backend_id)}/drain")

    async def update_weights(
        self,
        weights: str | wire.DiskWeights | wire.DistributedWeights,
        version: int,
        *,
        pool: str = "policy",
        mode: wire.PauseMode | None = None,
        force: bool = False,
    ) -> wire.PoolOutcome:
        """Load new weights into every engine of a pool.

        They come from a folder that the engines can read, or from a process group that they have joined. When this
        returns, every engine in service has them; `changed` is false if they had them before. `mode` is what happens
        to requests in flight: without it, `PauseMode.ABORT`.

        Raises:
            WeightsError: Engines refused or failed.
            ConflictError: The pool serves a newer version.
        """
        source = wire.DiskWeights(path=weights) if isinstance(weights, str) else weights
        mode = mode or wire.PauseMode.ABORT
        order = wire.WeightsRequest(source=source, version=version, pool=pool, mode=mode, force=force)
        return await self._order("/v1/weights", order.model_dump(mode="json"))

    async def join_weights_group(self, group: wire.WeightsGroupRequest) -> wire.PoolOutcome:
        """Have the engines of a pool join a process group; join it yourself at the same time.

        Raises:
            OrderError: An engine did not join.
        """
        return await self._order("/v1/weights/group", group.model_dump(mode="json"))

    async def pause(self, *, pool: str = "policy", mode: wire.PauseMode | None = None) -> wire.PoolOutcome:
        """Pause the generation of a pool. `mode` is what happens to requests in flight: without it, `PauseMode.ABORT`.

        Raises:
            OrderError: An engine did not pause.
        """
        order = wire.PauseRequest(pool=pool, mode=mode or wire.PauseMode.ABORT)
        return await self._order("/v1/pause", order.model_dump(mode="json"))

    async def resume(self, *, pool: str = "policy") -> wire.PoolOutcome:
        """Resume the generation of a paused pool.

        Raises:
            OrderError: An engine did not resume.
        """
        return await self._order("/v1/resume", wire.ResumeRequest(pool=pool).model_dump(mode="json"))

    async def abort(self, rollout_ids: list[str] | None = None) -> dict[str, wire.JsonValue]:
        """Cancel these rollouts, or all that have not ended, and return which or how many were cancelled."""
        body = wire.AbortRequest(rollout_ids=rollout_ids).model_dump(mode="json")
        return await self._connection.call(dict[str, wire.JsonValue], "POST", "/v1/abort", body)

    async def _order(self, path: str, body: dict[str, Any]) -> wire.PoolOutcome:
        return await self._connection.call(wire.PoolOutcome, "POST", path, body, seconds=ORDER_SECONDS)

    # -- the service -----------------------------------------------------------

    async def environments(self) -> list[wire.EnvironmentView]:
        """Return the environments that tasks can name."""
        return await self._connection.call(list[wire.EnvironmentView], "GET", "/v1/environments")

    async def dataset(
        self, environment: str, *, limit: int = 1_000, offset: int = 0, split: str | None = None
    ) -> list[dict[str, wire.JsonValue]]:
        """Return instances that ship with an environment, all or those of one split.

        Raises:
            NotFoundError: There is no such environment.
            InvalidRequestError: There is no such split.
        """
        params = {"limit": str(limit), "offset": str(offset)}
        params |= {} if split is None else {"split": split}
        path = f"/v1/environments/{environment}/dataset"
        return await self._connection.call(list[dict[str, wire.JsonValue]], "GET", path, params=params)

    async def sandboxes(self) -> list[wire.SandboxView]:
        """Return the sandboxes that are alive."""
        return await self._connection.call(list[wire.SandboxView], "GET", "/v1/sandboxes")

    async def nodes(self) -> list[wire.NodeView]:
        """Return the nodes that share the store: what each takes and works on, and what holds back new sandboxes."""
        return await self._connection.call(list[wire.NodeView], "GET", "/v1/nodes")

    async def hangs(self, *, node: str | None = None) -> wire.HangReport:
        """Return what is stuck, slow or held back at a node; by default, at the one that answers.

        Raises:
            NotFoundError: There is no such node.
        """
        params = {} if node is None else {"node": node}
        return await self._connection.call(wire.HangReport, "GET", "/v1/hangs", params=params)

    async def activity(self, rollout_id: str) -> wire.RolloutActivity:
        """Return what a rollout under way does or waits for now.

        Raises:
            NotFoundError: There is no such rollout.
            ConflictError: It is not under way.
        """
        path = f"/v1/rollouts/{rollout_id}/activity"
        return await self._connection.call(wire.RolloutActivity, "GET", path)

    async def drain_node(self, node: str) -> wire.NodeView:
        """Let a node end its rollouts and begin no more.

        Raises:
            NotFoundError: There is no such node.
            ConflictError: The node is dead.
        """
        return await self._connection.call(wire.NodeView, "POST", f"/v1/nodes/{node}/drain")

    async def resume_node(self, node: str) -> wire.NodeView:
        """Let a drained node begin rollouts again.

        Raises:
            NotFoundError: There is no such node.
            ConflictError: The node is dead.
        """
        return await self._connection.call(wire.NodeView, "POST", f"/v1/nodes/{node}/resume")

    async def remove_node(self, node: str) -> None:
        """Remove a dead node from the list of nodes.

        Raises:
            NotFoundError: There is no such node.
            ConflictError: The node is alive.
        """
        await self._connection.call(None, "DELETE", f"/v1/nodes/{node}")

    async def node(self) -> wire.NodeConcurrency:
        """Return how much the service runs at once."""
        return await self._connection.call(wire.NodeConcurrency, "GET", "/v1/node")

    async def update_node(self, patch: wire.NodePatch) -> wire.NodeConcurrency:
        """Change how much the service runs at once, until it restarts. Work under way is not interrupted."""
        body = patch.model_dump(mode="json", exclude_none=True)
        return await self._connection.call(wire.NodeConcurrency, "PATCH", "/v1/node", body)

    async def ready(self) -> None:
        """Wait until the service can take work, for as long as this client's patience lasts."""
        await self._connection.call(None, "GET", "/ready")

    async def readiness(self) -> wire.Readiness:
        """Return whether the service can take work now, and if not, why. This asks once.

        A refusal by a proxy, or by a service that is shutting down, counts as a reason too.

        Raises:
            UnreachableError: Nothing answers.
            ClientError: The answer says nothing about readiness.
        """
        return await self._connection.readiness()

    def events(
        self,
        *,
        after: int | None = None,
        kinds: Sequence[str] = (),
        subjects: Sequence[str] = (),
        follow: bool = True,
    ) -> AsyncGenerator[wire.Event]:
        """Yield events as they happen, without end; from `after` on when it is given, each once and in order.

        `kinds` and `subjects` choose among them. Without `follow`, it ends after those that there are by now. A lost
        connection is resumed after the last event seen or, before the first, where the server began. Close it with
        `contextlib.aclosing`.

        Raises:
            InvalidRequestError: There is no such kind.
        """
        from rollout_client._events import follow_events

        query = {"kind": kinds, "subject": subjects}
        return follow_events(self._connection, query, after=after, follow=follow)


def _backend(backend_id: str) -> str:
    """Return the path of a backend, whose id holds the path of its engine's address."""
    return f"/v1/backends/{quote(backend_id, safe='/:@')}"


def with_id(request: wire.RolloutRequest) -> wire.RolloutRequest:
    """Return the request with an id, so that sending it twice starts one rollout."""
    if request.rollout_id is not None:
        return request
    return request.model_copy(update={"rollout_id": uuid.uuid4().hex})

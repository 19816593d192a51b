"""Calls for single rollouts. A request without an id gets one here, so sending it again starts no second rollout."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import anyio

from rollout_client import _wire as wire
from rollout_client.external import LONG_POLL_SECONDS, ExternalRollout, open_external, wait_for_end

if TYPE_CHECKING:
    from rollout_client._connection import Connection


class RolloutCalls:
    """The calls of `RolloutClient` for single rollouts.

    They raise `NotFoundError` if there is no such rollout, run or sub-agent, or if it lacks what is asked for, as a
    trajectory before its end.
    """

    _connection: Connection

    async def submit(self, request: wire.RolloutRequest, *, wait_seconds: float = 0.0) -> wire.Rollout:
        """Submit a rollout, and wait up to `wait_seconds` for it to end. It is durable when this returns.

        A finished rollout comes with its trajectory.

        Raises:
            InvalidRequestError: The request cannot be carried out as it is.
            ConflictError: The id was used with another body.
        """
        body = with_id(request).model_dump(mode="json", exclude_defaults=True)
        return await self._connection.call(wire.Rollout, "POST", "/v1/rollouts", body, wait_seconds=wait_seconds)

    async def get(self, rollout_id: str, *, trajectory: bool = False) -> wire.Rollout:
        """Return a rollout in its present state."""
        params = {"trajectory": trajectory or None}
        return await self._connection.call(wire.Rollout, "GET", f"/v1/rollouts/{rollout_id}", params=params)

    async def wait(self, rollout_id: str, *, timeout_seconds: float | None = None) -> wire.Rollout:
        """Return a rollout with its trajectory once it has ended.

        Raises:
            TimeoutError: The rollout has not ended in time.
        """
        with anyio.fail_after(timeout_seconds):
            return await wait_for_end(self._connection, rollout_id)

    async def run(self, request: wire.RolloutRequest) -> wire.Rollout:
        """Request a rollout and wait for the result, through restarts of the server."""
        request = with_id(request)
        while True:
            rollout = await self.submit(request, wait_seconds=LONG_POLL_SECONDS)
            if rollout.state.terminal:
                return rollout

    def external_rollout(self, request: wire.RolloutRequest) -> AbstractAsyncContextManager[ExternalRollout]:
        """Begin a rollout whose agent is the program in the block: `async with client.external_rollout(...) as r`.

        The block begins when the policy may be called, as with `OpenAI(**r.openai)`. Report the reward with
        `r.end(reward)`. Without that, leaving the block has the environment score the outcome, and an exception
        fails the rollout. `await r.result()` then waits for the trajectory.

        Raises:
            InvalidRequestError: The request cannot be carried out as it is.
            RolloutOverError: The rollout ended before its program began.
        """
        return open_external(self._connection, with_id(request))

    async def cancel(self, rollout_id: str) -> wire.RolloutState | None:
        """Cancel a rollout, and return the state that it was in.

        None means that the server does not know it yet: it is cancelled if it arrives.
        """
        answer = await self._connection.call(dict[str, str | None], "DELETE", f"/v1/rollouts/{rollout_id}")
        was = answer.get("was")
        return None if was is None else wire.RolloutState(was)

    async def trajectory(self, rollout_id: str) -> wire.Trajectory:
        """Return the trajectory of a finished rollout."""
        return await self._connection.call(wire.Trajectory, "GET", f"/v1/rollouts/{rollout_id}/trajectory")

    async def rollout_nodes(self, rollout_id: str) -> wire.RolloutNodes:
        """Return the sub-agents of a finished rollout without trajectories, and how the work was divided among them."""
        return await self._connection.call(wire.RolloutNodes, "GET", f"/v1/rollouts/{rollout_id}/nodes")

    async def rollout_node(self, rollout_id: str, number: int) -> wire.AgentNode:
        """Return a sub-agent of a finished rollout, with its trajectory if that was asked for.

        `number` is the one at the end of its `node_id`.
        """
        return await self._connection.call(wire.AgentNode, "GET", f"/v1/rollouts/{rollout_id}/nodes/{number}")

    async def steps(self, rollout_id: str) -> wire.RolloutSteps:
        """Return the steps of a rollout so far, over all its attempts."""
        return await self._connection.call(wire.RolloutSteps, "GET", f"/v1/rollouts/{rollout_id}/steps")

    async def run_steps(self, run_id: str) -> AsyncGenerator[wire.RolloutAttempts]:
        """Yield the steps of the rollouts of a run as columns, a rollout at a time, except those without steps."""
        from rollout_client._answers import parse

        async for line in self.step_lines(run=run_id):
            yield parse(wire.RolloutAttempts, line)

    async def step_lines(self, *, run: str | None = None, rollouts: Sequence[str] = ()) -> AsyncGenerator[bytes]:
        """Yield the steps of the rollouts of a run, or of these, as they are sent: a JSON document for each rollout."""
        params = [("run", run)] if run is not None else [("rollout", name) for name in rollouts]
        async for line in self._connection.lines("/v1/steps", params):
            yield line

    async def activity(self, rollout_id: str) -> wire.RolloutActivity:
        """Return the step that a rollout under way is in now.

        Raises:
            ConflictError: It is not under way.
        """
        path = f"/v1/rollouts/{rollout_id}/activity"
        return await self._connection.call(wire.RolloutActivity, "GET", path)

    async def page(
        self, *, state: wire.RolloutState | None = None, cursor: str | None = None, limit: int = 100
    ) -> wire.RolloutPage:
        """Return a page of rollouts, oldest first, with the number of rollouts in each state."""
        params = {"state": state, "cursor": cursor, "limit": limit}
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


def with_id(request: wire.RolloutRequest) -> wire.RolloutRequest:
    """Return the request with an id, so that sending it twice starts one rollout."""
    if request.rollout_id is not None:
        return request
    return request.model_copy(update={"rollout_id": uuid.uuid4().hex})

"""Calls for engines: register them, and give their pools new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rollout_client import _wire as wire

if TYPE_CHECKING:
    from rollout_client._connection import Connection

ORDER_SECONDS = 1_800.0
"""The limit for requests that go to every engine, such as loading weights."""


class EngineCalls:
    """The calls of `RolloutClient` for engines."""

    _connection: Connection

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

    async def renew_backend(self, backend_id: str) -> None:
        """Extend the lease of an engine.

        Raises:
            NotFoundError: There is no such engine, perhaps because its lease ran out; register it again.
        """
        await self._connection.call(None, "POST", f"{_backend(backend_id)}/renew")

    async def drain_backend(self, backend_id: str) -> wire.BackendView:
        """Send an engine no new requests; it finishes those that it has.

        Raises:
            NotFoundError: There is no such engine.
        """
        return await self._connection.call(wire.BackendView, "POST", f"{_backend(backend_id)}/drain")

    async def update_weights(
        self,
        weights: str | wire.Weights,
        version: int,
        *,
        pool: str = "policy",
        mode: wire.PauseMode | None = None,
        force: bool = False,
    ) -> wire.PoolOutcome:
        """Load new weights into every engine of a pool.

        They come from a folder that the engines can read, or from a process group that they have joined;
        `ExternalWeights` are there already, and only their version is noted. When this
        returns, every engine in service has them; `changed` is false if they had them before. `mode` is the treatment
        of requests in flight: without it, `PauseMode.ABORT`.

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
        """Pause the generation of a pool. `mode` is the treatment of requests in flight: without it, `PauseMode.ABORT`.

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


def _backend(backend_id: str) -> str:
    """Return the path of a backend, whose id holds the path of its engine's address."""
    return f"/v1/backends/{quote(backend_id, safe='/:@')}"

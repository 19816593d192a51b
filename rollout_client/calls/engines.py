"""Calls for engines: register them, and give their pools new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from rollout_client import _wire as wire

if TYPE_CHECKING:
    from rollout_client._connection import Connection

ORDER_SECONDS = 1_800.0
"""The limit for requests that go to every engine, such as loading weights."""


class EngineCalls:
    """The calls of `RolloutClient` for engines.

    They raise `NotFoundError` if there is no such engine, perhaps because its lease ran out, and `OrderError` if an
    engine of a pool does not carry out an order.
    """

    _connection: Connection

    async def backends(self) -> list[wire.BackendView]:
        """Return the registered engines."""
        return await self._connection.call(list[wire.BackendView], "GET", "/v1/backends")

    async def add_backend(self, backend: wire.BackendSpec) -> wire.BackendView:
        """Register an engine, after asking it for its model."""
        return await self._connection.call(wire.BackendView, "POST", "/v1/backends", backend)

    async def remove_backend(self, backend_id: str) -> None:
        """Remove an engine at once; its requests continue elsewhere."""
        await self._connection.call(None, "DELETE", backend_path(backend_id))

    async def renew_backend(self, backend_id: str) -> None:
        """Extend the lease of an engine; if it ran out, register the engine again."""
        await self._connection.call(None, "POST", f"{backend_path(backend_id)}/renew")

    async def drain_backend(self, backend_id: str) -> wire.BackendView:
        """Send an engine no new requests; it finishes those that it has."""
        return await self._connection.call(wire.BackendView, "POST", f"{backend_path(backend_id)}/drain")

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
        `ExternalWeights` are there already, and only their version is noted. When this returns, every engine in service
        has them; `changed` is false if they had them before. `mode` is the treatment of requests in flight, by default
        `PauseMode.ABORT`.

        Raises:
            WeightsError: Engines refused or failed.
            ConflictError: The pool serves a newer version.
        """
        source = wire.DiskWeights(path=weights) if isinstance(weights, str) else weights
        mode = mode or wire.PauseMode.ABORT
        order = wire.WeightsRequest(source=source, version=version, pool=pool, mode=mode, force=force)
        return await self._order("/v1/weights", order)

    async def join_weights_group(self, group: wire.WeightsGroupRequest) -> wire.PoolOutcome:
        """Have the engines of a pool join a process group; join it yourself at the same time."""
        return await self._order("/v1/weights/group", group)

    async def pause(self, *, pool: str = "policy", mode: wire.PauseMode | None = None) -> wire.PoolOutcome:
        """Pause the generation of a pool; `mode` is for requests in flight, by default `PauseMode.ABORT`."""
        order = wire.PauseRequest(pool=pool, mode=mode or wire.PauseMode.ABORT)
        return await self._order("/v1/pause", order)

    async def resume(self, *, pool: str = "policy") -> wire.PoolOutcome:
        """Resume the generation of a paused pool."""
        return await self._order("/v1/resume", wire.ResumeRequest(pool=pool))

    async def abort(self, rollout_ids: list[str] | None = None) -> dict[str, wire.JsonValue]:
        """Cancel these rollouts, or all that have not ended, and return which or how many were cancelled."""
        body = wire.AbortRequest(rollout_ids=rollout_ids)
        return await self._connection.call(dict[str, wire.JsonValue], "POST", "/v1/abort", body)

    async def _order(self, path: str, body: object) -> wire.PoolOutcome:
        return await self._connection.call(wire.PoolOutcome, "POST", path, body, seconds=ORDER_SECONDS)


def backend_path(backend_id: str) -> str:
    """Return the path of a backend, whose id holds the path of its engine's address."""
    return f"/v1/backends/{quote(backend_id, safe='/:@')}"

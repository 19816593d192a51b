"""Loading weights into an SGLang server, from a folder or over a process group.

An update aborts no request, whatever the server's defaults. When it returns, the weights are in place and the cache is
flushed if that was asked for.
"""

from collections.abc import Mapping
from typing import Any

from api_schemas.inference import DistributedWeights, WeightsGroupRequest
from rollout_service.engines.errors import BackendProtocolError, BackendRejected
from rollout_service.engines.kinds.http_backend import CONTROL_SECONDS, HttpBackend
from rollout_service.engines.pool.weights.process_groups import buckets

_UPDATE_SECONDS = 900.0
_FLUSH_SECONDS = 30
_NOT_FLUSHED = "the cache was not flushed"
_NO_ROUTE = "answered 404"
_FROM_GROUP = "/update_weights_from_distributed"
_TENSOR_FIELDS = {"names", "dtypes", "shapes", "group_name"}
_GROUP_FIELDS = {"master_address", "master_port", "world_size", "group_name", "backend"}


class SGLangWeights(HttpBackend):
    async def update_weights(self, path: str, version: int, *, flush_cache: bool = True) -> None:
        body = {"model_path": path} | _about(version, flush_cache=flush_cache)
        await self._load("/update_weights_from_disk", body)
        self.has_weights(version)

    async def receive_weights(self, weights: DistributedWeights, version: int, *, flush_cache: bool = True) -> None:
        has_sessions = await self._begin()
        try:
            *firsts, last = (each.model_dump(include=_TENSOR_FIELDS) for each in buckets(weights))
            for part in firsts:
                await self._load(_FROM_GROUP, part | _about(None, flush_cache=False))
            await self._load(_FROM_GROUP, last | _about(version, flush_cache=flush_cache))
        finally:
            if has_sessions:
                await self._succeed("/end_weight_update", {})
        self.has_weights(version)

    async def ranks(self) -> int:
        """Return the ranks that the server takes in a process group, one per accelerator.

        Raises:
            BackendRejected: The server has replicas, of which SGLang can reach only one.
        """
        info = await self._get("/server_info")
        if (replicas := info.get("dp_size", 1)) != 1:
            raise BackendRejected(
                f"has {replicas} replicas (dp_size), which cannot join a process group",
                hint="Start one server for each replica, or load the weights from a folder.",
                backend_id=self.id,
            )
        return int(info.get("tp_size", 1)) * int(info.get("pp_size", 1))

    async def join_group(self, group: WeightsGroupRequest, first_rank: int) -> None:
        body = group.model_dump(include=_GROUP_FIELDS) | {"rank_offset": first_rank}
        try:
            await self._succeed("/init_weights_update_group", body, seconds=group.timeout_seconds)
        except BackendRejected as error:
            if _NO_ROUTE not in str(error):
                raise
            raise BackendRejected(
                "cannot take weights from a process group",
                hint='Load them from a folder: {"source": {"type": "disk", "path": ...}}.',
                backend_id=self.id,
            ) from error

    async def leave_group(self, name: str) -> None:
        await self._succeed("/destroy_weights_update_group", {"group_name": name})

    async def _begin(self) -> bool:
        """Open an update session, and return whether the server has them; older ones neither have nor need them."""
        try:
            await self._succeed("/begin_weight_update", {})
        except BackendRejected as error:
            if _NO_ROUTE in str(error):
                return False
            if "already open" not in str(error):
                raise
        return True

    async def _load(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            await self._succeed(path, body, seconds=_UPDATE_SECONDS)
        except BackendRejected as error:
            if not (body["flush_cache"] and _NOT_FLUSHED in str(error)):
                raise
            # The weights are in place, but a request that was aborted a moment ago still held its KV. The server
            # takes this for a failure and still reports the previous version.
            version = {"new_version": body["weight_version"], "abort_all_requests": False}
            with self._has_new_weights():
                await self._post(f"/flush_cache?timeout={_FLUSH_SECONDS}", {}, _FLUSH_SECONDS + CONTROL_SECONDS)
                await self._succeed("/update_weight_version", version)

    async def _succeed(self, path: str, body: Mapping[str, Any], *, seconds: float = CONTROL_SECONDS) -> None:
        answer = await self._post(path, body, seconds)
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise BackendProtocolError(f"{path} did not report success: {answer!r}", backend_id=self.id)


def _about(version: int | None, *, flush_cache: bool) -> dict[str, Any]:
    about: dict[str, Any] = {"flush_cache": flush_cache, "abort_all_requests": False}
    return about if version is None else about | {"weight_version": str(version)}

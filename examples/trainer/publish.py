"""Publish new weights to the engines, as a folder that they read or as tensors that are broadcast to them.

Guarantee: when `publish` returns, every engine of the pool that is in service samples with these weights.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import anyio
import torch
from anyio.to_thread import run_sync
from torch.distributed import distributed_c10d as c10d

from api_schemas.inference import BackendState, DistributedWeights, WeightsGroupRequest
from rollout_client import RolloutClient

from .checkpoint import weights_of

TIMEOUT = timedelta(seconds=120)
ADDRESS = "127.0.0.1"
POOL = "policy"


class DiskPublisher:
    def __init__(self, client: RolloutClient) -> None:
        self._client = client

    async def publish(self, folder: Path, model: torch.nn.Module, version: int) -> None:  # noqa: ARG002
        await self._client.update_weights(str(folder), version, force=True)


class GroupPublisher:
    """Broadcasts the tensors as rank 0 of a process group that the engines have joined; no file is read."""

    def __init__(self, client: RolloutClient, group: c10d.ProcessGroup, name: str) -> None:
        self._client = client
        self._group = group
        self._name = name

    @classmethod
    async def join(cls, client: RolloutClient) -> GroupPublisher:
        """Form a group with the engines that are in service now.

        Raises:
            ConflictError: An engine cannot join groups, like the embedded one.
        """
        size = 1 + sum(view.pool == POOL and view.state is BackendState.READY for view in await client.backends())
        name, port = f"trainer-{os.getpid()}", _free_port()
        order = WeightsGroupRequest(
            group_name=name, master_address=ADDRESS, master_port=port, world_size=size, backend="gloo"
        )
        made: list[c10d.ProcessGroup] = []

        async def make() -> None:
            made.append(await run_sync(_join, port, size, name))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(make)
            await client.join_weights_group(order)
        return cls(client, made[0], name)

    async def publish(self, folder: Path, model: torch.nn.Module, version: int) -> None:  # noqa: ARG002
        tensors = weights_of(model)
        source = DistributedWeights(
            type="distributed",
            group_name=self._name,
            names=list(tensors),
            dtypes=[str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            shapes=[list(each.shape) for each in tensors.values()],
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_sync, _broadcast, list(tensors.values()), self._group)
            await self._client.update_weights(source, version, force=True)


def _join(port: int, size: int, name: str) -> c10d.ProcessGroup:
    """Return a group in addition to torch's default one, under the names that engines look for."""
    store, rank, size = next(c10d.rendezvous(f"tcp://{ADDRESS}:{port}", 0, size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend("gloo"), c10d.PrefixStore(name, store), group_name=name, timeout=TIMEOUT
    )
    c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


def _broadcast(tensors: list[torch.Tensor], group: c10d.ProcessGroup) -> None:
    for tensor in tensors:
        torch.distributed.broadcast(tensor, src=0, group=group)


def _free_port() -> int:
    with socket.create_server((ADDRESS, 0)) as listener:
        return int(listener.getsockname()[1])

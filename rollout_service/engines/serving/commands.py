"""Commands to all backends of a pool: the requests, and who carries them out.

Whoever carries a command out, the caller gets the answer of every backend, or the error that refused it. A frozen pool
is paused and resumed like others, and takes no weights.
"""

from __future__ import annotations

from typing import Protocol

from pydantic import BaseModel

from api_schemas.inference import (
    FROZEN_NAMES,
    PauseRequest,
    PoolOutcome,
    ResumeRequest,
    WeightsGroupRequest,
    WeightsRequest,
    is_frozen,
)
from rollout_service.engines.errors import PoolFrozen
from rollout_service.engines.pool.pools import Pools
from rollout_service.store.engines_contract import CommandKind


class LeaveGroupRequest(BaseModel):
    pool: str
    group_name: str


PoolRequest = PauseRequest | ResumeRequest | WeightsRequest | WeightsGroupRequest | LeaveGroupRequest
REQUESTS: dict[CommandKind, type[PoolRequest]] = {
    CommandKind.PAUSE: PauseRequest,
    CommandKind.RESUME: ResumeRequest,
    CommandKind.WEIGHTS: WeightsRequest,
    CommandKind.JOIN_GROUP: WeightsGroupRequest,
    CommandKind.LEAVE_GROUP: LeaveGroupRequest,
}


class PoolCommands(Protocol):
    async def run(self, request: PoolRequest) -> PoolOutcome:
        """Carry out a command.

        Raises:
            InferenceError: The command was refused, as the methods of `BackendPool` say.
        """
        ...


class LocalCommands(PoolCommands):
    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def run(self, request: PoolRequest, *, is_repeated: bool = False) -> PoolOutcome:
        """Carry out a command; one that `is_repeated` may have reached some backends already."""
        refuse_weights_of_frozen(request)
        pool = self._pools[request.pool]
        match request:
            case PauseRequest():
                return await pool.pause(request.mode, request.drain_seconds)
            case ResumeRequest():
                return await pool.resume()
            case WeightsRequest():
                return await pool.load_weights(request, is_repeated=is_repeated and not request.force)
            case WeightsGroupRequest():
                return await pool.controller.join_group(request)
            case LeaveGroupRequest():
                return await pool.controller.leave_group(request.group_name)


def refuse_weights_of_frozen(request: PoolRequest) -> None:
    if isinstance(request, WeightsRequest | WeightsGroupRequest) and is_frozen(request.pool):
        raise PoolFrozen(
            f"pool {request.pool!r} is frozen, as its name says, and takes no weights",
            hint="Send them to the pool that is trained. To replace a frozen policy, start an engine with it, register "
            f"that, and remove the old one; or use a pool whose name is not {FROZEN_NAMES}.",
        )

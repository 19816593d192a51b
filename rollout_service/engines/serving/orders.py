"""A trainer's orders to a whole pool: to pause, to resume, to load weights, to join and leave process groups.

Each order is carried out by every service that serves the pool, and its outcome has the answer of each backend. Whoever
carries it out, the caller gets that outcome, or the error that refused the order. A frozen pool is paused and resumed
like others, and takes no weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import structlog
from pydantic import BaseModel, JsonValue

from api_schemas.events import EventKind
from api_schemas.inference import (
    FROZEN_NAMES,
    PauseRequest,
    PoolOutcome,
    ResumeRequest,
    WeightsGroupRequest,
    WeightsRequest,
    is_frozen,
)
from rollout_service.engines.errors import InferenceError, PoolFrozen, WeightsPartlyLoaded
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.weights.outcomes import (
    check_outcome,
    check_weights_outcome,
    failed_backends,
)
from rollout_service.store.engines_contract import CommandKind

log = structlog.get_logger(__name__)


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


Announce = Callable[[EventKind, str, dict[str, JsonValue]], None]
"""Writes an event of a kind, about a subject; never waits and never fails."""


class PoolOrders:
    """The orders of trainers to pools.

    Raises:
        UnknownPool: There is no such pool.
        NoBackendError: The pool has no backend; for `pause` and `resume`, no backend of any pool was registered.
        PoolFrozen: `update_weights` and `join_group`: the pool is frozen.
        WeightsConflict: `update_weights`: the version is older than the pool's, or in use for other weights;
            `join_group`: the number of ranks is wrong, or the trainer is not listening.
        BackendRejected: `join_group`: a backend cannot take weights from a process group.
        OrderFailed: An engine in service failed; the error has every answer.
    """

    def __init__(self, commands: PoolCommands, announce: Announce, check_known: Callable[[str], None]) -> None:
        self._commands = commands
        self._announce = announce
        self._check_known = check_known

    async def _run(self, request: PoolRequest) -> PoolOutcome:
        self._check_known(request.pool)
        return await self._commands.run(request)

    async def pause(self, request: PauseRequest) -> PoolOutcome:
        outcome = await self._run(request)
        log.info("pool paused", pool=request.pool, mode=request.mode)
        self._announce(EventKind.POOL_PAUSED, request.pool, {"mode": str(request.mode)})
        return check_outcome(outcome, "pause")

    async def resume(self, request: ResumeRequest) -> PoolOutcome:
        outcome = await self._run(request)
        log.info("pool resumed", pool=request.pool)
        self._announce(EventKind.POOL_RESUMED, request.pool, {})
        return check_outcome(outcome, "resume")

    async def update_weights(self, request: WeightsRequest) -> PoolOutcome:
        order = log.bind(pool=request.pool, version=request.version, source=request.weights.type)
        order.info("weight update begun", mode=request.mode, forced=request.force)
        began = time.monotonic()
        try:
            outcome = await self._run(request)
            self._tell_of_weights(outcome, time.monotonic() - began)
            check_weights_outcome(outcome, request.version)
        except WeightsPartlyLoaded as error:
            order.error("weight update done in part", error=str(error), hint=error.hint)
            raise
        except InferenceError as error:
            order.error("weight update refused", error=str(error), code=error.code, hint=error.hint)
            raise
        order.info(
            "weight update done",
            changed=outcome.changed,
            backends=sum(each.ok for each in outcome.outcomes),
            held_seconds=round(outcome.held_seconds, 3),
        )
        return outcome

    def _tell_of_weights(self, outcome: PoolOutcome, seconds: float) -> None:
        if not outcome.changed:
            return
        data: dict[str, JsonValue] = {
            "version": outcome.version,
            "seconds": round(seconds, 3),
            "held_seconds": round(outcome.held_seconds, 3),
            "backends": sum(each.ok for each in outcome.outcomes),
            "failed": len(failed_backends(outcome)),
        }
        self._announce(EventKind.WEIGHTS_UPDATED, outcome.pool, data)

    async def join_group(self, request: WeightsGroupRequest) -> PoolOutcome:
        return check_outcome(await self._run(request), "join the process group")

    async def leave_group(self, pool: str, name: str) -> PoolOutcome:
        return check_outcome(await self._run(LeaveGroupRequest(pool=pool, group_name=name)), "leave the process group")

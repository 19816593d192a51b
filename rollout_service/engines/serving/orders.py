"""A trainer's orders to a whole pool: to pause, to resume, to load weights, to join and leave process groups.

Each order is carried out by every service that serves the pool, and its outcome has the answer of each backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from pydantic import JsonValue

from api_schemas.events import EventKind
from api_schemas.inference import (
    PauseRequest,
    PoolOutcome,
    ResumeRequest,
    WeightsGroupRequest,
    WeightsRequest,
)
from rollout_service.engines.errors import InferenceError, WeightsPartlyLoaded
from rollout_service.engines.pool.weights.outcomes import (
    check_outcome,
    check_weights_outcome,
    failed_backends,
)
from rollout_service.engines.serving.commands import LeaveGroupRequest, PoolCommands, PoolRequest

log = structlog.get_logger(__name__)

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

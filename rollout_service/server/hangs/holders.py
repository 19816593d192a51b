"""The holders of intended waits: a pause, a full queue, a host under pressure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic import JsonValue

from api_schemas.inference import BackendState
from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from rollout_service.engines.pool.pool import BackendPool
from rollout_service.pipeline.context import Stages
from rollout_service.pipeline.fair_slots import FairSlots
from rollout_service.pipeline.stage import StageLimiter
from sandboxes.scheduling.admission import AdmissionController


@dataclass(frozen=True, slots=True)
class Holder:
    subject: str
    why: str
    """The rest of a sentence that says who waits."""
    hint: str
    is_gone: bool = False
    """Whether it cannot give way, such as a pool without an engine in service."""
    detail: dict[str, JsonValue] = field(default_factory=dict)


class Holders:
    def __init__(
        self,
        stages: Stages,
        admission: AdmissionController,
        slots: FairSlots,
        pool: Callable[[str], BackendPool | None],
    ) -> None:
        self._stages = stages
        self._admission = admission
        self._slots = slots
        self._pool = pool
        self._explain: dict[StepKind, Callable[[str], Holder]] = {
            StepKind.PLACE: self._full_queue,
            StepKind.WORKER: self._busy_workers,
            StepKind.HOST: self._host,
            StepKind.POOL_QUEUE: self._full_pool,
            StepKind.PAUSED_POOL: self._closed_pool,
            StepKind.SUBAGENT: self._taken_slots,
        }

    def of(self, kind: StepKind, name: str) -> Holder:
        return self._explain[kind](name)

    def pause_of(self, pool: str) -> Holder | None:
        found = self._pool(pool)
        if found is None or found.paused_at is None:
            return None
        since = datetime.fromtimestamp(found.paused_at, UTC)
        return Holder(
            pool,
            f"pool {pool} has been paused since {since:%H:%M:%S} UTC",
            "Whoever paused it, such as a weight update, resumes it; or resume it with POST /v1/resume.",
            detail={"paused_since": since.isoformat()},
        )

    def _full_queue(self, name: str) -> Holder:
        places, workers = self._stage(name).places, self._stage(name).workers
        why = f"all {places.size} places before the stage {name} are taken, and {workers.in_use} of its "
        return self._waits_for_worker(name, f"{why}{workers.size} workers are at work", places=places.size)

    def _busy_workers(self, name: str) -> Holder:
        size = self._stage(name).workers.size
        return self._waits_for_worker(name, f"all {size} workers of the stage {name} are at work")

    def _waits_for_worker(self, name: str, why: str, **detail: int) -> Holder:
        workers = self._stage(name).workers
        hint = f"It goes on once a worker of {name} is free. If this lasts, raise [pipeline] {name}_workers."
        return Holder(name, why, hint, detail={**detail, "workers": workers.size, "working": workers.in_use})

    def _stage(self, name: str) -> StageLimiter:
        limiter: StageLimiter = getattr(self._stages, Stage(name))
        return limiter

    def _host(self, _: str) -> Holder:
        reasons = self._admission.hold_reasons
        texts = "; ".join(reason.text for reason in reasons) or "sandboxes that came first are being started"
        return Holder(
            "host",
            f"this host starts no more sandboxes ({texts})",
            "It goes on once a sandbox ends or the pressure falls; GET /v1/nodes has the readings.",
            detail={"reasons": [reason.text for reason in reasons], "in_use": self._admission.used},
        )

    def _full_pool(self, name: str) -> Holder:
        pool = self._pool(name)
        views = pool.views() if pool is not None else []
        in_flight = sum(view.in_flight for view in views)
        return Holder(
            name,
            f"pool {name} has as many requests in flight as it may have, {in_flight}",
            "It goes on once one of them ends. If its engines have room, raise the limit of requests in flight.",
            detail={"in_flight": in_flight, "waiting": pool.waiting if pool is not None else 0},
        )

    def _closed_pool(self, name: str) -> Holder:
        if (pause := self.pause_of(name)) is not None:
            return pause
        pool = self._pool(name)
        views = [] if pool is None else pool.views()
        errors = "; ".join(f"{view.backend_id}: {view.last_error or view.state}" for view in views)
        return Holder(
            name,
            f"no engine of pool {name} is in service ({errors or 'it has none'})",
            "Restart an engine, or register another with POST /v1/backends.",
            is_gone=not any(view.state is BackendState.READY for view in views),
            detail={"backends": [view.backend_id for view in views]},
        )

    def _taken_slots(self, _: str) -> Holder:
        return Holder(
            "sub-agents",
            f"all {self._slots.total} slots of sub-agents are taken",
            "It goes on once a sub-agent ends. If this lasts, raise [pipeline] subagent_slots.",
            detail={"slots": self._slots.total, "waiting": self._slots.waiting},
        )

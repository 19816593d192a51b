"""What turns served sessions into batches, at work: parts are closed and handed to runs until it is cancelled.

Guarantee: a store that fails for a while delays this work, and ends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import anyio

from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.live.contract import LiveStore
from rollout_service.live.judging.teacher import TeacherReader
from rollout_service.live.metrics import LiveMetrics
from rollout_service.live.parts.closing import PartCloser
from rollout_service.live.parts.deletion import SessionDeletion
from rollout_service.live.parts.delivery import PartDelivery
from rollout_service.live.parts.environment import SessionEnvironment, SessionParts
from rollout_service.live.parts.orders import TrainedPool
from rollout_service.store.contract import Store
from rollout_service.store.retrying import retry_until_stored
from rollout_service.tokens import ChatRenderer

LOOK_SECONDS = 0.2
"""How often to look for sessions to close and parts to hand over. Each look is a few short reads."""


class InService:
    """Since when a pool has been in service, as far as it was looked at."""

    def __init__(self, serving: PolicyServing, pool: str, clock: Callable[[], float] = time.time) -> None:
        self._serving = serving
        self._pool = pool
        self._clock = clock
        self._since: float | None = None

    def since(self) -> float | None:
        """Return since when, in Unix seconds; None while the pool is not in service."""
        pools, _ = self._serving.in_service()
        if self._pool not in pools:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        return self._since


@dataclass(frozen=True, slots=True)
class SessionTraining:
    """The parts of the service that make batches of sessions."""

    closer: PartCloser
    delivery: PartDelivery
    environment: SessionEnvironment
    deletion: SessionDeletion

    @classmethod
    def make(
        cls,
        live: LiveStore,
        store: Store,
        serving: PolicyServing,
        *,
        judge_pool: str,
        teacher: TeacherReader,
        trained_pool: TrainedPool,
        node: str,
        metrics: LiveMetrics,
    ) -> Self:
        """Make them; `trained_pool` returns the pool whose runs train on what a pool serves."""
        shared_by = node if store.cluster.is_shared else None
        judge = InService(serving, judge_pool)

        def renderer_of(pool: str) -> ChatRenderer:
            # A candidate's pool may be gone, and has the format of the pool that it was for.
            return serving.connect(pool if serving.expects(pool) else trained_pool(pool))[0].renderer

        parts = SessionParts(live, store.runs, renderer_of, teacher, shared_by)
        return cls(
            closer=PartCloser(live, store.runs, judging_since=judge.since, trained_pool=trained_pool),
            delivery=PartDelivery(live, store.runs, node=shared_by, handed_over=metrics.handed_over),
            environment=SessionEnvironment(parts),
            deletion=SessionDeletion(live, store),
        )

    async def run(self) -> None:
        """Close parts and hand them over until cancelled."""
        while True:
            await retry_until_stored("make parts of sessions", self.closer.step)
            await retry_until_stored("hand parts of sessions to runs", self.delivery.step)
            await anyio.sleep(LOOK_SECONDS)

"""A judge of served turns, and what a test of its stage sees of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from prometheus_client import CollectorRegistry

from rollout_service.base.signals import ChangeSignal
from rollout_service.judging.judge import PoolJudge
from rollout_service.judging.metrics import JudgeMetrics
from rollout_service.live.contract import TurnMarkRecord, TurnRecord
from rollout_service.live.judging.overrides import Overrides
from rollout_service.live.judging.stage import FindHint, JudgeStage, TurnJudge, value_rubric
from rollout_service.settings.live import LiveJudgeSettings
from tests.support.sampling import ScriptedSampler


class ServedPools:
    """Says which pools are in service."""

    def __init__(self, *pools: str) -> None:
        self.pools = frozenset(pools)
        self.changed = ChangeSignal()

    def in_service(self) -> tuple[frozenset[str], anyio.Event]:
        return self.pools, self.changed.next

    def serve(self, *pools: str) -> None:
        self.pools = frozenset(pools)
        self.changed.notify()


class MarksSeen:
    """Observes marks, and wakes who waits for a number of them."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, int, TurnMarkRecord]] = []
        self._changed = ChangeSignal()

    def judged(self, turn: TurnRecord, mark: TurnMarkRecord) -> None:
        self.marks.append((turn.session_id, turn.turn, mark))
        self._changed.notify()

    async def wait_for(self, count: int) -> list[TurnMarkRecord]:
        with anyio.fail_after(10):
            while len(self.marks) < count:
                await self._changed.wait()
        return [mark for _, _, mark in self.marks]


@asynccontextmanager
async def judging(stage: JudgeStage) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage.run)
        yield
        tasks.cancel_scope.cancel()


def a_judge(sampler: ScriptedSampler, find_hint: FindHint | None = None, **settings: object) -> TurnJudge:
    described = LiveJudgeSettings.model_validate(settings)
    judge = PoolJudge(sampler, JudgeMetrics(CollectorRegistry()))
    return TurnJudge(judge, value_rubric(described), Overrides.load(described.overrides), find_hint)

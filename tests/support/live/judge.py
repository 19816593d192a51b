"""A scripted sampler for judges of served turns, and a stage around it."""

from collections.abc import Sequence

import anyio
from prometheus_client import CollectorRegistry

from api_schemas.trajectories import Message
from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.errors import NoBackendError
from rollout_service.judging.contract import SampledText
from rollout_service.judging.judge import PoolJudge
from rollout_service.judging.metrics import JudgeMetrics
from rollout_service.live.contract import TurnMarkRecord, TurnRecord
from rollout_service.live.judging.overrides import Overrides
from rollout_service.live.judging.turn_judge import FindHint, TurnJudge, value_rubric
from rollout_service.settings.live import LiveJudgeSettings

Said = str | Exception | None


class SaysNext:
    """Says its texts in turn, from the first again after the last; raises errors, and hangs where there is None."""

    def __init__(self, *says: Said) -> None:
        self.says = list(says)
        self.prompts: list[Sequence[Message]] = []
        self.asked = ChangeSignal()
        self.at_once = self.most_at_once = 0
        self.is_served = True

    def model(self, pool: str) -> str:
        if not self.is_served:
            raise NoBackendError(f"pool {pool!r} has no backend")
        return "judge@7"

    async def sample(
        self, pool: str, messages: Sequence[Message], *, max_tokens: int, temperature: float
    ) -> SampledText:
        said = self.says[len(self.prompts) % len(self.says)]
        self.prompts.append(messages)
        self.asked.notify()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if said is None:
                await anyio.sleep_forever()
            await anyio.lowlevel.checkpoint()
        finally:
            self.at_once -= 1
        if isinstance(said, Exception):
            raise said
        return SampledText(str(said), truncated=False, prompt_tokens=50, sampled_tokens=2)


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


def a_judge(sampler: SaysNext, find_hint: FindHint | None = None, **settings: object) -> TurnJudge:
    described = LiveJudgeSettings.model_validate(settings)
    judge = PoolJudge(sampler, JudgeMetrics(CollectorRegistry()))
    return TurnJudge(judge, value_rubric(described), Overrides.load(described.overrides), find_hint)

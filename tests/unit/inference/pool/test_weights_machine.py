"""Every turn is exact through any number of weight updates, at any token, in any mode, with faults in between.

The engines sample only when told to, and an interruption can fall between any two tokens. They record which weights
sampled the token at each position of each request.
"""

from collections.abc import Callable
from contextlib import ExitStack

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from api_schemas.inference import PauseMode, WeightsRequest
from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import GenerateRequest, Generation
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.testing import Fault, ScriptedEngine
from tests.support.engines.pools import SCRIPT, request, running
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ENGINES = 2
BASE_ID_LENGTH = 32
OPTIONS = PoolOptions(slow_start=0.0, probe_interval=30.0, hold_seconds=30.0, max_failures=100, unhealthy_after=1_000)
FAULTS = [Fault.DROP, Fault.QUEUE_ABORT, Fault.GARBAGE, Fault.SHORT_LOGPROBS, Fault.NO_LOGPROBS]


class SteppedEngine(ScriptedEngine):
    """Samples when told to."""

    def __init__(self) -> None:
        super().__init__(SCRIPT)
        self.runs_freely = True
        self.sampled_by: dict[tuple[str, int], str] = {}
        """The weights that last sampled the token at a position of a request."""

    async def _generate(self, body, request):
        if _is_trial(body["input_ids"]):
            self._faults.appendleft(None)
        return await super()._generate(body, request)

    def advance(self, count: int) -> None:
        for turn in self._turns.values():
            if not (self.paused or turn.aborted):
                self._sample_some(turn, count)
                turn.interrupted.set()

    def run_freely(self) -> None:
        self.runs_freely = True
        self.advance(10_000)

    def _sample_some(self, turn, count: int) -> None:
        for _ in range(min(count, len(turn.reply.ids) - turn.done)):
            self.sampled_by[turn.rid[:BASE_ID_LENGTH], turn.prompt_tokens + turn.done] = self.version
            turn.done += 1

    async def _sample(self, turn) -> None:
        while not turn.aborted and turn.done < len(turn.reply.ids):
            if self.paused:
                await self._wait_for_resume(turn)
            elif self.runs_freely or _is_trial(turn.asked.ids):
                self._sample_some(turn, 10_000)
            else:
                turn.interrupted.clear()
                await turn.interrupted.wait()


def _is_trial(ids) -> bool:
    """Return whether a request tries new weights; those of the test have other prompts."""
    return list(ids) == [0]


class WeightUpdates(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.threads = ExitStack()
        self.portal = self.threads.enter_context(start_blocking_portal())
        self.engines = [SteppedEngine() for _ in range(ENGINES)]
        pools = running(*self.engines, options=OPTIONS)
        _, self.pool = self.threads.enter_context(self.portal.wrap_async_context_manager(pools))
        self.asked: list[tuple[GenerateRequest, object]] = []
        self.version = 0
        self.paused = False
        for engine in self.engines:
            engine.runs_freely = False

    def do(self, order: Callable[[], object]) -> None:
        async def on_loop() -> None:
            order()

        self.portal.call(on_loop)

    @rule(budget=st.integers(1, 30), prompt=st.integers(1, 5))
    def ask(self, budget: int, prompt: int) -> None:
        asked = request(budget, list(range(1, 1 + prompt)))
        self.asked.append((asked, self.portal.start_task_soon(self.pool.generate, asked)))
        if not self.paused:
            self.portal.call(self.until_sent, len(self.asked))

    async def until_sent(self, count: int) -> None:
        with anyio.move_on_after(1):  # a fault may come first
            await until(lambda: sum(engine.in_flight for engine in self.engines) >= count - self.ended())

    def ended(self) -> int:
        return sum(future.done() for _, future in self.asked)

    @rule(engine=st.integers(0, ENGINES - 1), count=st.integers(1, 12))
    def sample(self, engine: int, count: int) -> None:
        self.do(lambda: self.engines[engine].advance(count))

    @rule(mode=st.sampled_from(PauseMode), gap=st.integers(1, 3))
    def update(self, mode: PauseMode, gap: int) -> None:
        self.version += gap
        order = WeightsRequest(path=f"/weights/{self.version}", version=self.version, mode=mode, drain_seconds=0.02)
        outcome = self.portal.call(self.pool.load_weights, order)
        assert [each.ok for each in outcome.outcomes] == [True] * ENGINES
        assert self.pool.paused == self.paused

    @rule()
    def update_to_the_present_version(self) -> None:
        if self.version:
            order = WeightsRequest(path=f"/weights/{self.version}", version=self.version)
            assert not self.portal.call(self.pool.load_weights, order).changed

    @rule()
    def abort(self) -> None:
        self.portal.call(self.pool.abort)

    @precondition(lambda self: not self.paused)
    @rule(mode=st.sampled_from([PauseMode.ABORT, PauseMode.IN_PLACE, PauseMode.RETRACT]))
    def pause(self, mode: PauseMode) -> None:
        self.portal.call(self.pool.pause, mode)
        self.paused = True

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        self.portal.call(self.pool.resume)
        self.paused = False

    @rule(engine=st.integers(0, ENGINES - 1), fault=st.sampled_from(FAULTS))
    def fail(self, engine: int, fault: Fault) -> None:
        self.engines[engine].inject(fault)

    def teardown(self) -> None:
        if not hasattr(self, "asked"):
            return
        try:
            for engine in self.engines:
                engine.runs_freely = True
            if self.paused:
                self.resume()
            for engine in self.engines:
                self.do(engine.run_freely)
            for asked, future in self.asked:
                self.check(asked, future.result(timeout=30))
        finally:
            self.threads.close()

    def check(self, asked: GenerateRequest, whole: Generation) -> None:
        start, budget = len(asked.input_ids), asked.sampling.max_new_tokens
        positions = range(start, start + budget)
        assert whole.output_ids == [SCRIPT.token_at(position) for position in positions]
        assert len(whole.logprobs) == budget
        assert whole.finish_reason is FinishReason.LENGTH
        assert whole.versions == sorted(whole.versions)
        truths = [
            {
                engine.sampled_by[asked.request_id, position].replace("default", "0")
                for engine in self.engines
                if (asked.request_id, position) in engine.sampled_by
            }
            for position in positions
        ]
        for version, truth in zip(whole.versions, truths, strict=True):
            assert str(version) in truth


TestWeightUpdates = WeightUpdates.TestCase
TestWeightUpdates.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)

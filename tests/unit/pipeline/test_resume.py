"""An interrupted rollout continues from its last saved turn, token for token, or begins anew for a counted reason."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Sampling, Stage, StopReason
from api_schemas.tasks import Limits, Task
from api_schemas.trajectories import FinishReason, ForkReason, Message
from rollout_service.engines import contract as inference
from rollout_service.engines.errors import BackendUnreachable
from rollout_service.engines.serving import turn_log
from rollout_service.engines.serving.session import PolicySession
from rollout_service.engines.serving.turn_log import TurnLog
from rollout_service.environments.contract import Environment, EnvironmentSpec, Replayable
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.episodes import Episode, Policy, Score, WorkClock
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.pipeline.settlement import keeps_turns
from rollout_service.pipeline.turn_writer import TurnWriter
from rollout_service.settings import PipelineSettings
from rollout_service.store.contract import UnsavedTurn
from rollout_service.store.sqlite.store import SqliteStore
from rollout_service.tokens import Conversation, ParsedTurn, ToolSpec, check_invariants
from tests.support.attempts import attempt_context

pytestmark = pytest.mark.slow

STOP = 1
SETTINGS = PipelineSettings(retry_seconds=0.01, drain_seconds=0.0, lease_seconds=30)
Work = Callable[[Episode], Awaitable[StopReason]]


@dataclass
class CharRenderer:
    """A chat format with one id per character: messages end with 0, the policy's turns with 1."""

    offset: int = 0
    rereads_history: bool = False

    def render(self, messages, tools=()):
        return [token + self.offset for message in messages for token in (*map(ord, message.content), 0)]

    def bridge(self, prompt, output, messages, tools=(), history=()):
        return [*prompt, *output, *self.render(messages)]

    def parse(self, output, prompt, tools, prefix):
        return ParsedTurn("".join(chr(i) for i in output if i > 1), None, (), closed=STOP in output)


@dataclass
class CountingEngine:
    """Answers with the number of turns that the prompt already has; dies, hangs or fails at chosen turns."""

    sampled: int = 0
    hangs_at: int | None = None
    fails_at: int | None = None
    hanging: anyio.Event = field(default_factory=anyio.Event)

    async def generate(
        self, request: inference.GenerateRequest, *, affinity: str | None = None
    ) -> inference.Generation:
        number = list(request.input_ids).count(STOP)
        if number == self.hangs_at:
            self.hanging.set()
            await anyio.sleep_forever()
        if number == self.fails_at:
            self.fails_at = None
            raise BackendUnreachable("the engine is gone")
        self.sampled += 1
        ids = [*map(ord, f"turn {number}"), STOP]
        return inference.Generation(
            output_ids=ids,
            logprobs=[-0.1 * (number + 1)] * len(ids),
            versions=[number] * len(ids),
            finish_reason=FinishReason.STOP,
            prompt_tokens=len(request.input_ids),
            cached_tokens=number,
            kept_kv_versions=frozenset({number}),
            backend_id="b",
            engine_seconds=0.0,
        )


class Policies:
    """Opens sessions with one engine."""

    def __init__(self, engine: CountingEngine, renderer: CharRenderer) -> None:
        self.engine, self.renderer = engine, renderer
        self._changed = anyio.Event()

    def in_service(self) -> tuple[frozenset[str], anyio.Event]:
        return frozenset({"policy"}), self._changed

    async def open(
        self, request: RolloutRequest, tools: list[ToolSpec], turns: TurnLog | None = None
    ) -> Policy:
        return PolicySession(
            Conversation(self.renderer, tools),  # type: ignore[arg-type]
            self.engine,
            affinity=request.rollout_id or "",
            sampling=Sampling(),
            stop_token_ids=(STOP,),
            context_length=10_000,
            turns=turns,
        )

    def model(self, pool: str) -> str:
        return pool

    def close(self, request: RolloutRequest) -> None:
        pass


class Worked(Environment):
    """An environment whose agent is a function of the test."""

    def __init__(self, work: Work, replayable: Replayable = "tools") -> None:
        self.spec = EnvironmentSpec(name="worked")
        self.replayable = replayable
        self._work = work

    async def run(self, episode: Episode) -> StopReason:
        return await self._work(episode)

    async def evaluate(self, episode: Episode) -> Score:
        return Score(float(episode.policy.usage.turns))


@dataclass
class Outputs:
    """An agent whose tool gives these outputs in order."""

    outputs: Sequence[str]
    compacts_at: int | None = None

    async def __call__(self, episode: Episode) -> StopReason:
        policy = episode.policy
        messages = [Message(role="user", content="task")]
        for number, output in enumerate(self.outputs):
            if number == self.compacts_at:
                policy.replace([Message(role="user", content="sum")], ForkReason.COMPACTION)
                messages = []
            turn = await policy.respond(messages, max_tokens=50)
            messages = [Message(role="tool", content=f"{output} {turn.message.content}")]
        return StopReason.FINISHED


FOUR = Outputs(["a", "b", "c", "d"])


class Bench:
    """A store that outlives the services that work on it, one after another."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.engine = CountingEngine()
        self.metrics = ""

    async def submit(self, **limits: float) -> None:
        request = RolloutRequest(
            rollout_id="r", task=Task(environment="worked"), limits=Limits.model_validate(limits)
        )
        await self.store.submit(request)

    @asynccontextmanager
    async def service(
        self,
        work: Work,
        *,
        replayable: Replayable = "tools",
        resume: bool = True,
        renderer: CharRenderer | None = None,
        settings: PipelineSettings = SETTINGS,
    ) -> AsyncIterator[None]:
        environments = EnvironmentRegistry([Worked(work, replayable)])
        provider: Any = None  # the environment has no sandbox
        policies = Policies(self.engine, renderer or CharRenderer())
        context = attempt_context(self.store, provider, environments, policies, settings)
        writer = TurnWriter(self.store, context.owner, context.metrics)
        if resume:
            context = replace(context, turn_writer=writer)
        async with writer.running(), Pipeline(context, settings).running():
            yield
        self.metrics = generate_latest(context.metrics.registry).decode()

    async def interrupt(self, at: int, work: Work = FOUR, **how) -> None:
        """Stop a service while turn `at` is being sampled; the turns before are saved."""
        self.engine.hangs_at, self.engine.hanging = at, anyio.Event()
        async with self.service(work, **how):
            with anyio.fail_after(20):
                await self.engine.hanging.wait()
        self.engine.hangs_at = None

    async def finish(self, work: Work = FOUR, **how) -> Rollout:
        """Let a service end the rollout."""
        async with self.service(work, **how):
            with anyio.fail_after(20):
                rollout = await self.store.wait_for_result("r")
        return rollout.model_copy(update={"trajectory": await self.store.trajectory("r")})

    async def resume_events(self) -> list[dict]:
        return [e.data for e in await self.store.events(after=0) if e.kind == "rollout.resume"]


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    async with await SqliteStore.open(":memory:") as store:
        yield Bench(store)


async def undisturbed(work: Work = FOUR) -> Rollout:
    async with bench() as b:
        await b.submit()
        return await b.finish(work)


@given(at=st.lists(st.integers(0, 3), max_size=3), compacts_at=st.none() | st.integers(1, 3))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_interruptions_change_no_token_and_sample_no_turn_twice(at, compacts_at):
    work = Outputs(FOUR.outputs, compacts_at)
    expected = await undisturbed(work)
    async with bench() as b:
        await b.submit()
        for turn in sorted(at):
            b.engine.hangs_at = None
            if compacts_at is None or turn < compacts_at:  # the engine counts the turns of a segment
                await b.interrupt(turn, work)
        rollout = await b.finish(work)
        assert rollout.trajectory == expected.trajectory
        assert rollout.trajectory is not None
        check_invariants(rollout.trajectory)
        assert (rollout.usage, rollout.reward) == (expected.usage, expected.reward)
        assert rollout.attempt == 1
        assert b.engine.sampled == len(FOUR.outputs)
        assert await b.store.saved_turns("r") == []


async def test_a_resumed_rollout_says_so():
    async with bench() as b:
        await b.submit()
        await b.interrupt(3)
        rollout = await b.finish()
        [span] = [span for span in rollout.spans if span.stage is Stage.ROLLOUT]
        assert span.turns_replayed == 3
        [event] = await b.resume_events()
        assert (event["outcome"], event["reason"], event["turns"]) == ("resumed", "", 3)
        assert 'rollout_resumes_total{outcome="resumed",reason=""} 1.0' in b.metrics
        assert "rollout_resumed_turns_total 3.0" in b.metrics


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        ("output_differs", {"work": Outputs(["other", "b", "c", "d"])}),
        ("ended_early", {"work": Outputs(["a"])}),
        ("prompt_differs", {"renderer": CharRenderer(offset=1_000)}),
        ("not_replayable", {"replayable": "never"}),
        ("disabled", {"resume": False}),
    ],
)
async def test_what_cannot_be_replayed_begins_anew_and_is_counted(reason, how):
    async with bench() as b:
        await b.submit()
        await b.interrupt(2)
        assert len(await b.store.saved_turns("r")) == 2
        work = how.get("work", FOUR)
        rollout = await b.finish(**how)
        assert (rollout.state, rollout.attempt, rollout.retries) == (RolloutState.COMPLETED, 1, [])
        assert rollout.usage.turns == len(work.outputs)
        assert b.engine.sampled == 2 + len(work.outputs), "everything is sampled again"
        assert rollout.trajectory is not None
        check_invariants(rollout.trajectory)
        assert f'rollout_resumes_total{{outcome="begun_anew",reason="{reason}"}} 1.0' in b.metrics
        [event] = await b.resume_events()
        assert (event["outcome"], event["reason"]) == ("begun_anew", reason)
        failed = [span for span in rollout.spans if span.error]
        assert len(failed) == (reason in {"output_differs", "ended_early", "prompt_differs"})


async def test_an_environment_that_is_never_replayable_saves_only_a_mark():
    async with bench() as b:
        await b.submit()
        await b.interrupt(2, replayable="never")
        assert await b.store.saved_turns("r") == [b""]
        await b.finish(replayable="never")
        assert 'reason="not_replayable"} 1.0' in b.metrics


async def test_damaged_turns_are_not_played():
    async with bench() as b:
        await b.submit()
        [lease] = await b.store.claim("gone", limit=1, lease_seconds=30)
        await b.store.save_turns("gone", [UnsavedTurn("r", lease.token, 0, b"damaged")])
        rollout = await b.finish()
        assert rollout.usage.turns == 4
        assert 'reason="unreadable"} 1.0' in b.metrics


async def test_a_replay_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(turn_log, "REPLAY_GRACE_SECONDS", 0.05)
    hangs = [False, True, False]

    async def work(episode: Episode) -> StopReason:
        if hangs.pop(0):
            await anyio.sleep_forever()
        return await FOUR(episode)

    async with bench() as b:
        await b.submit()
        await b.interrupt(2, work)
        assert (await b.finish(work)).usage.turns == 4
        assert 'reason="too_slow"} 1.0' in b.metrics


async def test_an_agent_that_hides_the_difference_is_found_out():
    async def work(episode: Episode) -> StopReason:
        try:
            return await Outputs(["a", "other", "c"])(episode)
        except Exception:  # noqa: BLE001 - as careless agents do
            return StopReason.FINISHED

    async with bench() as b:
        await b.submit()
        await b.interrupt(3)
        assert (await b.finish(work)).usage.turns == 3
        assert 'reason="output_differs"} 1.0' in b.metrics


async def test_a_failed_engine_costs_no_turn():
    async with bench() as b:
        await b.submit()
        b.engine.fails_at = 2
        rollout = await b.finish()
        assert (rollout.attempt, b.engine.sampled, rollout.usage.turns) == (2, 4, 4)
        assert 'rollout_resumes_total{outcome="resumed",reason=""} 1.0' in b.metrics


@pytest.mark.parametrize(
    ("boundary", "stage", "kept"),
    [
        (Boundary.INFERENCE, Stage.ROLLOUT, True),
        (Boundary.SANDBOX, Stage.INIT, True),
        (Boundary.STORE, None, True),
        (Boundary.SANDBOX, Stage.ROLLOUT, False),
        (Boundary.SANDBOX, Stage.EVALUATE, False),
    ],
)
def test_a_failure_that_says_nothing_about_the_work_keeps_the_turns(boundary, stage, kept):
    error = ErrorInfo(code="gone", boundary=boundary, message="gone", retryable=True, stage=stage)
    assert keeps_turns(error) == kept


async def test_time_worked_before_an_interruption_counts_and_the_replay_does_not():
    seconds: list[float] = []

    async def work(episode: Episode) -> StopReason:
        for number in range(3):
            await episode.policy.respond([Message(role="tool", content=str(number))], max_tokens=50)
            seconds.append(episode.clock.seconds)
            await anyio.sleep(0.3)
        return StopReason.FINISHED

    async with bench() as b:
        await b.submit(rollout_seconds=0.8)
        await b.interrupt(2, work)
        before = list(seconds)
        seconds.clear()
        rollout = await b.finish(work)
    assert rollout.error.code == "stage_timeout", "0.6 s before and 0.3 s after are more than 0.8 s"
    assert seconds[1] == pytest.approx(before[1], abs=0.05), "the clock shows what it showed"


async def test_no_limit_is_reached_while_a_clock_stands_still():
    clock = WorkClock()
    with clock.limit(0.05) as scope:
        clock.stop()
        await anyio.sleep(0.1)
        clock.start(0.0)
    assert not scope.cancelled_caught
    with clock.limit(10.0) as scope:
        clock.start(clock.seconds + 11.0)
        await anyio.sleep_forever()
    assert scope.cancelled_caught

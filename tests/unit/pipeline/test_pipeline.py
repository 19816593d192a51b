"""The pipeline keeps its promises with scripted environments and policies and a store in memory."""

import asyncio
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from itertools import cycle
from typing import Any
from unittest.mock import AsyncMock

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from api_schemas.rollouts import AgentProgram, Rollout, RolloutRequest, RolloutState, Stage, StopReason
from api_schemas.rollouts.trees import Assigns, Work
from api_schemas.tasks import Limits, Task
from rollout_service.agents.parallel.settings import ParallelSettings
from rollout_service.base.errors import MAX_FRAMES, EnvironmentFailedError, StoreError, UnavailableError
from rollout_service.environments.contract import Environment, EnvironmentSpec, EvaluateIn
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.episodes import Episode, Policy, Score
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.pipeline.context import AttemptContext
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.pipeline.settlement import ClaimRules
from rollout_service.pipeline.stage import ResizableSemaphore, Slot, StageLimiter
from rollout_service.settings import PipelineSettings
from rollout_service.store import retrying
from rollout_service.store.contract import Lease
from rollout_service.store.sqlite.store import SqliteStore
from rollout_service.testing.scripted_policy import ScriptedPolicy
from sandboxes import Sandbox
from sandboxes.errors import LimitExceededError, SandboxStartError
from sandboxes.scheduling.admission import AdmissionController
from tests.support.attempts import OpenedPolicies, attempt_context, unlimited_admission
from tests.support.named_sandboxes import NamedProvider, NamedSandbox
from tests.support.store.trees import conversation, node
from tests.support.waiting import until

Step = Callable[[Episode], Awaitable[Any]]


class Played(Environment):
    """An environment whose steps are functions that the test provides."""

    def __init__(
        self,
        *,
        init: Step | None = None,
        run: Step | None = None,
        execute: Step | None = None,
        evaluate: Step | None = None,
        **spec: Any,
    ) -> None:
        self.spec = EnvironmentSpec(name="played", **spec)
        self._steps = {"init": init, "run": run, "execute": execute, "evaluate": evaluate}

    async def init(self, episode: Episode) -> None:
        if step := self._steps["init"]:
            await step(episode)

    async def run(self, episode: Episode) -> StopReason:
        if step := self._steps["run"]:
            return await step(episode) or StopReason.FINISHED
        return StopReason.FINISHED

    async def execute(self, episode: Episode) -> None:
        if step := self._steps["execute"]:
            await step(episode)

    async def evaluate(self, episode: Episode) -> Score:
        if step := self._steps["evaluate"]:
            return await step(episode) or Score(1.0)
        return Score(1.0)


def _scripted(*_: object) -> Policy:
    return ScriptedPolicy(["an answer"] * 100)


class Bench:
    """A running pipeline, its store, and what it holds."""

    def __init__(
        self,
        store: SqliteStore,
        pipeline: Pipeline,
        context: AttemptContext,
        provider: NamedProvider,
        policies: OpenedPolicies,
    ):
        self.store, self.pipeline, self.context, self.provider = store, pipeline, context, provider
        self.policies = policies

    async def submit(self, rollout_id: str, *, pool: str = "policy", **limits: float) -> None:
        await self.store.submit(
            RolloutRequest(
                rollout_id=rollout_id,
                task=Task(environment="played"),
                pool=pool,
                limits=Limits.model_validate(limits),
            )
        )

    async def submit_all(self, count: int, **limits: float) -> None:
        """Submit `r0`, `r1` and so on."""
        for number in range(count):
            await self.submit(f"r{number}", **limits)

    async def results(self, count: int) -> list[Rollout]:
        return [await self.result(f"r{number}") for number in range(count)]

    async def result(self, rollout_id: str) -> Rollout:
        with anyio.fail_after(20):
            rollout = await self.store.wait_for_result(rollout_id)
        assert rollout is not None
        return rollout

    async def run(self, rollout_id: str = "r", **limits: float) -> Rollout:
        await self.submit(rollout_id, **limits)
        return await self.result(rollout_id)

    async def idle(self) -> None:
        """Wait until nothing is under way, and check that nothing is held."""
        await until(lambda: not self.pipeline.live(), 20)
        assert not self.provider.alive
        for limiter in (self.context.stages.rollout, self.context.stages.evaluate):
            assert limiter.idle


SETTINGS = PipelineSettings(
    init_workers=2, rollout_workers=2, evaluate_workers=2, retry_seconds=0.01, drain_seconds=0.2
)


@asynccontextmanager
async def bench(
    environment: Environment,
    *,
    store: SqliteStore | None = None,
    provider: NamedProvider | None = None,
    settings: PipelineSettings = SETTINGS,
    admission: AdmissionController | None = None,
    environments: EnvironmentRegistry | None = None,
    is_stopping: bool = False,
    claims: ClaimRules | None = None,
) -> AsyncIterator[Bench]:
    store = store or await SqliteStore.open(":memory:")
    provider = provider or NamedProvider()
    policies = OpenedPolicies(_scripted, "policy", "frozen-1")
    context = attempt_context(
        store, provider, environments or EnvironmentRegistry([environment]), policies, settings, admission
    )
    context = replace(context, is_stopping=lambda: is_stopping)
    pipeline = Pipeline(context, settings, claims)
    async with pipeline.running():
        yield Bench(store, pipeline, context, provider, policies)


async def forever(_: Episode) -> None:
    await anyio.sleep_forever()


async def answer(episode: Episode) -> StopReason:
    await episode.policy.respond([], max_tokens=10)
    return StopReason.ANSWERED


async def test_a_rollout_uses_the_environment_of_its_instance():
    class General(Played):
        def for_instance(self, instance: dict[str, Any]) -> Environment:
            assert instance == {}
            return Played(image="of-the-task")

    async with bench(General()) as b:
        assert (await b.run()).reward == 1.0
        assert b.provider.started == 1  # the general environment needs no sandbox


async def test_a_rule_that_changes_during_a_claim_leads_to_another_claim(monkeypatch):
    claims, store = ClaimRules(), await SqliteStore.open(":memory:")
    claims.suit({})
    claim = store.claim

    async def claim_and_change(*args: Any, **options: Any) -> Any:
        leases = await claim(*args, **options)
        claims.suit({"played": 0.0})
        return leases

    monkeypatch.setattr(store, "claim", claim_and_change)
    async with bench(Played(), store=store, claims=claims) as b:
        assert (await b.run()).reward == 1.0


async def test_what_fails_while_the_service_ends_is_left_to_the_next_one():
    failed = anyio.Event()

    async def fail(_: Episode) -> None:
        failed.set()
        raise EnvironmentFailedError("its processes were ended")

    async with bench(Played(evaluate=fail), is_stopping=True) as b:
        await b.submit("r")
        await failed.wait()
        await b.pipeline.drain()
        [lease] = await b.store.claim("the next one", limit=1, lease_seconds=10)
        assert lease.attempt == 1, "nothing has failed"


async def test_a_rollout_completes_with_a_span_per_stage():
    async with bench(Played(run=answer)) as b:
        rollout = await b.run()
        assert (rollout.state, rollout.reward, rollout.attempt) == (RolloutState.COMPLETED, 1.0, 1)
        assert rollout.stop_reason is StopReason.ANSWERED
        assert [span.stage for span in rollout.spans] == list(Stage)
        assert rollout.usage.turns == 1
        assert await b.store.trajectory("r") is not None
        await b.idle()


async def delegate(episode: Episode) -> None:
    episode.work = Work(width_max=3, assigns=Assigns(executed=4, valid=3, duplicate=1))


async def test_the_parts_of_a_reward_say_how_the_work_was_divided():
    async def score(_: Episode) -> Score:
        return Score(0.5, {"tests": 2.0})

    async def fail(_: Episode) -> None:
        raise EnvironmentFailedError("the grader is gone")

    parallel = ParallelSettings(max_assigns_per_turn=12, max_width=5)
    async with bench(Played(run=delegate, evaluate=score, parallel=parallel)) as b:
        rollout = await b.run()
        assert rollout.reward == 0.5
        parts = {"perf": 0.5, "parallel": 0.25, "width": 0.5, "finish": 0.75}
        assert rollout.reward_parts == parts | {"tests": 2.0}
    async with bench(Played(run=delegate, evaluate=score, parallel=ParallelSettings())) as b:
        assert (await b.run()).reward_parts["width"] == 2 / 7, "without max_width, a turn's limit is the width"
    async with bench(Played(run=delegate, evaluate=fail, parallel=parallel)) as b:
        assert ((failed := await b.run()).reward, failed.reward_parts) == (None, {})
    async with bench(Played(run=answer, evaluate=score)) as b:
        assert (await b.run()).reward_parts == {"tests": 2.0}


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (Score(float("nan")), "nan for the reward"),
        (Score("1"), "'1' for the reward"),
        (Score(True), "True for the reward"),
        (Score(1.0, {"moves": float("-inf")}), "-inf for moves"),
        (Score(-1e39), "-1e+39 for the reward"),
        (Score(10**400), "1000"),
        (0.4, "returned 0.4"),
        ("0" * 500, "'000"),
    ],
)
async def test_a_score_that_is_none_is_a_failure_of_its_environment(returned, named):
    async def evaluate(_: Episode) -> Any:
        return returned

    async with bench(Played(evaluate=evaluate)) as b:
        failed = await b.run()
        assert (failed.state, failed.error.code, failed.attempt) == (RolloutState.FAILED, "environment_failed", 1)
        assert "evaluate of 'played' returned" in failed.error.message
        assert named in failed.error.message
        assert len(failed.error.message) < 200


@pytest.mark.parametrize(
    ("method", "named"),
    [("init", "init of 'played'"), ("run", "the agent of 'played'"), ("evaluate", "evaluate of 'played'")],
)
async def test_code_that_would_end_the_process_fails_its_rollout_alone(method, named):
    async def leave(_: Episode) -> Any:
        sys.exit("bad argument")

    async def wait(_: Episode) -> Any:
        lost = asyncio.get_running_loop().create_future()
        lost.cancel()
        await lost

    for step, said in ((leave, "called sys.exit('bad argument')"), (wait, "raised CancelledError, although nobody")):
        async with bench(Played(**{method: step})) as b:
            failed = await b.run()
            assert failed.error.code == "environment_failed"
            assert failed.error.message.startswith(f"{named} {said}")


@pytest.mark.parametrize(
    ("where", "alive", "started"),
    [(EvaluateIn.NONE, 0, 1), (EvaluateIn.SAME, 1, 1), (EvaluateIn.FRESH, 1, 2)],
)
async def test_the_sandbox_at_an_evaluation_is_the_one_that_it_asks_for(where, alive, started):
    provider = NamedProvider()
    at_evaluation = []

    async def evaluate(episode: Episode) -> None:
        at_evaluation.append((len(provider.alive), episode.sandbox is not None))

    async with bench(Played(evaluate=evaluate, image="any", evaluate_in=where), provider=provider) as b:
        await b.run()
        await b.idle()
        assert at_evaluation == [(alive, bool(alive))]
        assert (provider.started, provider.most) == (started, 1)


class Stepped(Played):
    """Makes three checkpoints, and looks at those up to one."""

    def __init__(self, last: int) -> None:
        super().__init__(image="any", evaluate_in="fresh", run=self._make)
        self._last = last
        self.seen: list[tuple[int, Sandbox | None]] = []

    async def _make(self, episode: Episode) -> None:
        for _ in range(3):
            assert episode.checkpoint is not None
            await episode.checkpoint()

    async def evaluate_checkpoint(self, episode: Episode, number: int) -> bool:
        self.seen.append((number, episode.sandbox))
        return number < self._last


@pytest.mark.parametrize("last", [0, 1, 2, 9])
async def test_each_checkpoint_is_scored_in_a_sandbox_of_its_own(last):
    provider, stepped = NamedProvider(), Stepped(last)
    async with bench(stepped, provider=provider) as b:
        assert (await b.run()).reward == 1.0
        scored = min(last + 1, 3)
        assert [number for number, _ in stepped.seen] == [*range(scored)]
        assert len({id(sandbox) for _, sandbox in stepped.seen}) == scored
        assert (provider.started, provider.most) == (1 + scored + 1, 1)
        await b.idle()


async def test_a_failed_evaluation_scores_the_checkpoints_again():
    stepped = Stepped(9)
    failures = iter([SandboxStartError("the host said no")])

    async def fail_once(_: Episode) -> None:
        for error in failures:
            raise error

    stepped._steps["evaluate"] = fail_once
    async with bench(stepped) as b:
        assert (await b.run()).reward == 1.0
        assert [number for number, _ in stepped.seen] == [0, 1, 2, 0, 1, 2]
        await b.idle()


async def test_a_program_of_the_agent_runs_where_the_grader_never_is():
    seen: list[Sandbox | None] = []

    async def look(episode: Episode) -> None:
        seen.append(episode.sandbox)

    steps = {"run": look, "execute": look, "evaluate": look}
    async with bench(Played(image="any", evaluate_in=EvaluateIn.FRESH, runs_submission=True, **steps)) as b:
        await b.run()
        await b.idle()
        assert len(set(seen)) == b.provider.started == 3
        assert b.provider.most == 1


@pytest.mark.parametrize(
    ("kept", "reward", "endings", "notes"),
    [
        ("keep", 0.0, 0, []),
        ("end", 1.0, 1, []),
        ("end", 0.5, 1, ["processes of the agent or of init were ended before the grading: serve; "]),
    ],
)
async def test_what_was_ended_is_noted_where_it_may_have_cost_reward(kept, reward, endings, notes):
    async def score(_: Episode) -> Score:
        return Score(reward)

    environment = Played(image="any", evaluate_in=EvaluateIn.SAME, agent_processes=kept, evaluate=score)
    async with bench(environment) as b:
        rollout = await b.run()
        await b.idle()
        assert (rollout.reward, b.provider.endings) == (reward, endings)
        assert [note.partition("`")[0] for note in rollout.notes] == notes


@pytest.mark.parametrize("ended_at", [1, 2])
async def test_an_agent_that_ends_the_sandbox_of_its_evaluation_gets_zero(ended_at):
    provider = NamedProvider(ended_at=[ended_at])
    environment = Played(image="any", evaluate_in=EvaluateIn.SAME, runs_submission=True)
    async with bench(environment, provider=provider) as b:
        rollout = await b.run()
        await b.idle()
        assert (rollout.state, rollout.reward) == (RolloutState.COMPLETED, 0.0)
        assert "sandbox ended" in rollout.notes[-1]


@pytest.mark.parametrize("stage", list(Stage))
async def test_a_deadline_fails_the_rollout_and_keeps_its_trajectory(stage):
    async def turn_then_hang(episode: Episode) -> None:
        await answer(episode)
        await anyio.sleep_forever()

    steps = {"init": forever, "rollout": turn_then_hang, "evaluate": forever}
    name = {"rollout": "run"}.get(stage, stage.value)
    played = {"run": answer} | {name: steps[stage]}
    settings = SETTINGS.model_copy(update={"max_attempts": 1})
    async with bench(Played(**played, image="any"), settings=settings) as b:
        rollout = await b.run(**{f"{stage.value}_seconds": 0.05})
        assert rollout.state is RolloutState.FAILED
        assert rollout.reward is None
        assert rollout.stop_reason is StopReason.STAGE_TIMEOUT
        assert (rollout.error.code, rollout.error.stage) == ("stage_timeout", stage)
        trajectory = await b.store.trajectory("r")
        assert len(trajectory.messages) == (0 if stage is Stage.INIT else 1)
        await b.idle()


async def test_time_in_a_queue_counts_against_no_deadline():
    async def slow(_: Episode) -> None:
        await anyio.sleep(0.15)

    settings = SETTINGS.model_copy(update={"rollout_workers": 1})
    async with bench(Played(run=slow), settings=settings) as b:
        await b.submit_all(4, rollout_seconds=0.5)
        rollouts = await b.results(4)
        assert {rollout.state for rollout in rollouts} == {RolloutState.COMPLETED}
        assert max(span.queued_seconds for rollout in rollouts for span in rollout.spans) > 0.3


@pytest.mark.parametrize("ahead", [30.0, -30.0])
async def test_a_store_with_another_clock_changes_no_time_in_a_queue(ahead):
    store = await SqliteStore.open(":memory:", clock=lambda: time.time() + ahead)
    async with bench(Played(), store=store) as it:
        rollout = await it.run()
        assert all(0 <= span.queued_seconds < 20 for span in rollout.spans)


async def test_a_wait_for_room_for_artifacts_counts_against_no_deadline(monkeypatch):
    async def export(*_: Any, **__: Any) -> AsyncIterator[bytes]:
        yield bytes(2 << 20)

    monkeypatch.setattr(NamedSandbox, "export_path", export)
    for used in ("exec", "import_path"):
        monkeypatch.setattr(NamedSandbox, used, AsyncMock())
    async with bench(Played(image="any", evaluate_in=EvaluateIn.FRESH, artifacts=["/workspace"])) as b:
        budget = b.context.sandboxes._budget
        await budget.reserve(budget.size)
        await b.submit("r", rollout_seconds=0.2)
        await until(lambda: b.context.stages.rollout.workers.in_use)
        await anyio.sleep(0.4)
        await budget.give_back(budget.size)
        assert (await b.result("r")).state is RolloutState.COMPLETED
        await b.idle()
        assert budget._left == budget.size


async def test_a_slow_evaluation_holds_up_no_rollout():
    release = anyio.Event()
    ran: list[str] = []

    async def run(episode: Episode) -> None:
        ran.append(episode.request.rollout_id or "")

    async def evaluate(_: Episode) -> None:
        await release.wait()

    async with bench(Played(run=run, evaluate=evaluate)) as b:
        await b.submit_all(20)
        await until(lambda: len(ran) >= 20, 10)
        release.set()
        assert {one.state for one in await b.results(20)} == {RolloutState.COMPLETED}


async def test_live_sandboxes_are_bounded():
    async with bench(Played(image="any", evaluate_in=EvaluateIn.FRESH)) as b:
        await b.submit_all(40)
        await b.results(40)
        await b.idle()
        bound = SETTINGS.init_workers + SETTINGS.rollout_queue + SETTINGS.rollout_workers
        assert b.provider.most <= bound + SETTINGS.evaluate_workers


async def test_waiting_for_the_host_is_time_in_a_queue():
    async def slow(_: Episode) -> None:
        await anyio.sleep(0.1)

    admission = unlimited_admission(2)
    environment = Played(init=slow, image="any", evaluate_in=EvaluateIn.FRESH)
    async with bench(environment, admission=admission) as b:
        await b.submit_all(5, init_seconds=0.3, evaluate_seconds=0.3)
        rollouts = await b.results(5)
        assert {rollout.state for rollout in rollouts} == {RolloutState.COMPLETED}
        assert max(span.queued_seconds for rollout in rollouts for span in rollout.spans) > 0.3
        assert b.provider.most <= 2
        await b.idle()
        assert (admission.used, admission.waiting) == (0, 0)


class InTurn(EnvironmentRegistry):
    """A registry that returns its environments in turn."""

    def __init__(self, *environments: Environment) -> None:
        super().__init__()
        self._next = cycle(environments)

    def get(self, name: str) -> Environment:
        return next(self._next)


@pytest.mark.slow
@pytest.mark.parametrize("ceiling", [2, 3, 5])
async def test_graders_and_agents_that_wait_for_each_other_all_finish(ceiling):
    """Graded in place, a rollout holds a sandbox and needs a worker; graded afresh, it is the other way around."""

    async def work(_: Episode) -> None:
        await anyio.sleep(0.002)

    kinds = [
        Played(run=work, evaluate=work, image="any", evaluate_in=where)
        for where in (EvaluateIn.SAME, EvaluateIn.FRESH, EvaluateIn.SAME, EvaluateIn.NONE)
    ]
    admission = unlimited_admission(ceiling)
    settings = SETTINGS.model_copy(update={"evaluate_workers": 1, "rollout_workers": 4})
    async with bench(kinds[0], environments=InTurn(*kinds), admission=admission, settings=settings) as b:
        await b.submit_all(40)
        for i in range(0, 40, 7):
            await b.store.cancel(f"r{i}")
        await b.results(40)
        await b.idle()
        assert b.provider.most <= ceiling
        assert (admission.used, admission.waiting) == (0, 0)


async def test_the_sessions_of_the_tools_are_open_before_the_agent_begins(monkeypatch):
    opened: list[str] = []

    async def bash(_: Sandbox) -> None:
        await anyio.sleep(0.01)
        opened.append("bash")

    async def run(_: Episode) -> None:
        assert opened == ["bash"]

    monkeypatch.setattr(NamedSandbox, "bash", bash)
    environment = Played(run=run, image="any", tools=["bash", "edit"], evaluate_in=EvaluateIn.FRESH)
    async with bench(environment) as b:
        assert (await b.run()).state is RolloutState.COMPLETED
        assert opened == ["bash"]  # and no session in the grader's sandbox


async def test_limits_that_were_reached_are_counted():
    async def run(episode: Episode) -> None:
        episode.limit_violations.append(LimitExceededError("too much", limit="memory"))

    async with bench(Played(run=run)) as b:
        await b.run()
        assert b'rollout_sandbox_breaches_total{limit="memory"} 1.0' in b.context.metrics.render()


async def test_a_sandbox_that_ran_out_of_memory_is_a_note_a_line_of_the_log_and_counted():
    provider = NamedProvider()
    provider.limits_reached = (LimitExceededError("the sandbox ran out of memory", limit="memory"),)
    async with bench(Played(image="any", evaluate_in=EvaluateIn.FRESH), provider=provider) as b:
        with capture_logs() as logs:
            rollout = await b.run()
        assert rollout.state is RolloutState.COMPLETED
        assert rollout.notes == [
            "the agent: the sandbox ran out of memory",
            "the grader: the sandbox ran out of memory",
        ]
        assert sum(line["event"] == "a sandbox reached a limit" for line in logs) == 2
        # Those of the agent are counted with its calls.
        assert b'rollout_sandbox_breaches_total{limit="memory"} 1.0' in b.context.metrics.render()


async def test_an_infrastructure_failure_is_tried_again():
    async with bench(Played(image="any"), provider=NamedProvider(failures=2)) as b:
        rollout = await b.run()
        assert (rollout.state, rollout.attempt) == (RolloutState.COMPLETED, 3)
        assert [error.code for error in rollout.retries] == ["sandbox_start"] * 2
        assert [error.attempt for error in rollout.retries] == [1, 2]
        assert [(span.attempt, span.stage, span.error) for span in rollout.spans] == [
            (1, Stage.INIT, "sandbox_start"),
            (2, Stage.INIT, "sandbox_start"),
            *((3, stage, None) for stage in Stage),
        ]


async def test_attempts_are_limited():
    async with bench(Played(image="any"), provider=NamedProvider(failures=99)) as b:
        rollout = await b.run()
        assert (rollout.state, rollout.attempt, rollout.reward) == (RolloutState.FAILED, 3, None)
        assert rollout.error.boundary == "sandbox"


async def test_a_defect_of_an_environment_is_not_tried_again():
    async def broken(_: Episode) -> None:
        raise EnvironmentFailedError("the grader wrote nothing", hint="Look at it.")

    async with bench(Played(evaluate=broken)) as b:
        rollout = await b.run()
        assert (rollout.state, rollout.attempt, rollout.reward) == (RolloutState.FAILED, 1, None)
        assert (rollout.error.code, rollout.error.hint) == ("environment_failed", "Look at it.")


async def test_frozen_tokens_to_train_on_fail_their_rollout_alone():
    async def add_a_sub_agent(episode: Episode) -> None:
        mask = int(episode.request.rollout_id == "r")
        episode.nodes.append(node("r", 1, trajectory=conversation(2, mask=mask)))

    async with bench(Played(run=add_a_sub_agent)) as it:
        failed, other = await it.run("r"), await it.run("other")
        assert (failed.state, failed.reward, failed.nodes) == (RolloutState.FAILED, None, [])
        assert failed.error.code == "frozen_tokens"
        assert failed.error.hint
        assert other.state is RolloutState.COMPLETED
        await it.idle()


async def test_an_unknown_exception_is_a_defect_and_names_the_last_calls_in_the_environments_code():
    def deeper(times: int) -> None:
        if not times:
            raise KeyError("oops")
        deeper(times - 1)

    async def broken(_: Episode) -> None:
        deeper(50)

    async with bench(Played(evaluate=broken)) as b:
        rollout = await b.run()
        assert rollout.error.code == "internal_error"
        assert "KeyError" in rollout.error.message
        assert len(rollout.error.frames) == MAX_FRAMES
        assert rollout.error.frames[-1].startswith(f"{__name__}, line ")
        assert rollout.error.frames[-1].endswith(", in deeper")
        assert rollout.error.frames[-1] in rollout.error.hint
        assert "/" not in "".join(rollout.error.frames)  # tenants must not learn the host's paths


async def test_an_evaluation_that_failed_is_tried_again_without_a_new_rollout():
    runs, evaluations = [], []

    async def run(_: Episode) -> None:
        runs.append(1)

    async def evaluate(_: Episode) -> None:
        evaluations.append(1)
        if len(evaluations) == 1:
            raise UnavailableError("the judge is away")

    async with bench(Played(run=run, evaluate=evaluate)) as b:
        rollout = await b.run()
        assert rollout.state is RolloutState.COMPLETED
        assert (len(runs), len(evaluations), rollout.attempt) == (1, 2, 1)
        assert [span.error for span in rollout.spans] == [None, None, "unavailable", None]


async def test_evaluations_that_fail_while_their_queue_is_full_are_tried_again():
    evaluations = 0

    async def evaluate(_: Episode) -> None:
        nonlocal evaluations
        evaluations += 1
        if evaluations == 1:
            await until(lambda: evaluation.places.in_use == 1)
            raise UnavailableError("the judge is away")

    settings = SETTINGS.model_copy(update={"evaluate_workers": 1, "evaluate_queue": 1})
    async with bench(Played(evaluate=evaluate), settings=settings) as b:
        evaluation = b.context.stages.evaluate
        await b.submit_all(2)
        assert [rollout.state for rollout in await b.results(2)] == [RolloutState.COMPLETED] * 2
        await b.idle()


@pytest.mark.parametrize("stage", ["init", "run", "evaluate"])
async def test_cancel_in_any_stage_frees_what_is_held(stage):
    entered = anyio.Event()

    async def hang(_: Episode) -> None:
        entered.set()
        await anyio.sleep_forever()

    environment = Played(**{stage: hang}, image="any", evaluate_in=EvaluateIn.SAME)
    async with bench(environment) as b:
        await b.submit("r")
        with anyio.fail_after(10):
            await entered.wait()
        await b.store.cancel("r")
        rollout = await b.result("r")
        assert (rollout.state, rollout.stop_reason) == (RolloutState.CANCELLED, StopReason.CANCELLED)
        assert rollout.reward is None
        assert rollout.error is None
        await b.idle()


async def test_cancel_before_submit_and_while_queued():
    async with bench(Played(run=forever, image="any")) as b:
        assert await b.store.cancel("early") is None
        assert (await b.run("early")).state is RolloutState.CANCELLED
        await b.submit_all(60)
        for i in reversed(range(60)):
            await b.store.cancel(f"r{i}")
        assert {one.state for one in await b.results(60)} == {RolloutState.CANCELLED}
        await b.idle()


async def test_a_shutdown_hands_back_what_could_not_end():
    store = await SqliteStore.open(":memory:")
    entered = anyio.Event()

    async def hang(_: Episode) -> None:
        entered.set()
        await anyio.sleep_forever()

    async with bench(Played(run=hang, image="any"), store=store) as b:
        await b.submit("r")
        with anyio.fail_after(10):
            await entered.wait()
    assert not b.provider.alive
    rollout = await store.get("r")
    assert rollout.state is RolloutState.QUEUED
    async with bench(Played(), store=store) as b:
        rollout = await b.result("r")
        assert (rollout.state, rollout.attempt) == (RolloutState.COMPLETED, 1)


async def test_a_crash_counts_as_an_attempt_up_to_the_limit():
    store = await SqliteStore.open(":memory:")
    await store.submit(RolloutRequest(rollout_id="r", task=Task(environment="played")))
    await store.submit(RolloutRequest(rollout_id="queued", task=Task(environment="played")))
    for number in range(3):
        lease, _ = await store.claim(f"service {number}", limit=2, lease_seconds=60)
        assert await store.advance(lease, f"service {number}", RolloutState.INIT)
        await store.recover("next")
    async with bench(Played(), store=store) as b:
        rollout = await b.result("r")
        assert (rollout.state, rollout.attempt) == (RolloutState.FAILED, 3)
        assert rollout.error.code == "attempts_exhausted"
        untouched = await b.result("queued")
        assert (untouched.state, untouched.attempt) == (RolloutState.COMPLETED, 1)


@pytest.mark.slow
async def test_a_store_that_cannot_be_written_for_longer_than_a_lease_starts_nothing_twice(tmp_path):
    path = tmp_path / "store.sqlite3"
    release = anyio.Event()

    async def run(_: Episode) -> None:
        await release.wait()

    settings = SETTINGS.model_copy(update={"lease_seconds": 0.3, "rollout_workers": 6})
    async with await SqliteStore.open(path) as store:
        await store._thread.read(lambda db: db.execute("PRAGMA busy_timeout = 20").fetchone())
        async with bench(Played(run=run, image="any"), store=store, settings=settings) as b:
            await b.submit_all(6)
            with anyio.fail_after(10):
                while (await store.counts()).get(RolloutState.ROLLOUT) != 6:
                    await anyio.sleep(0.01)
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                await anyio.sleep(1.5)
                other.execute("ROLLBACK")
            await b.submit("r6")
            await until(lambda: b.pipeline.live() >= 7, 10)
            release.set()
            rollouts = await b.results(7)
            assert {(r.state, r.attempt) for r in rollouts} == {(RolloutState.COMPLETED, 1)}
            await b.idle()
            assert b.provider.started == 7


class FailsOnce(SqliteStore):
    """A store that fails when a rollout enters its second stage for the first time."""

    has_failed = False

    async def advance(self, lease: Lease, owner: str, state: RolloutState) -> bool:
        if state is RolloutState.ROLLOUT and not self.has_failed:
            self.has_failed = True
            raise StoreError("the disk is full")
        return await super().advance(lease, owner, state)


async def test_a_store_that_fails_between_two_stages_costs_no_attempt(monkeypatch):
    monkeypatch.setattr(retrying, "STORE_RETRY_SECONDS", 0.01)
    async with await FailsOnce.open(":memory:") as store, bench(Played(), store=store) as b:
        rollout = await b.run()
        assert store.has_failed
        assert (rollout.state, rollout.attempt, rollout.retries) == (RolloutState.COMPLETED, 1, [])


async def test_a_result_that_cannot_be_written_fails_its_rollout_and_no_other():
    async def broken(episode: Episode) -> Score:
        if episode.request.rollout_id == "r":
            episode.program = AgentProgram(harness="program", seconds=1.0, output="\ud800")
        return Score(1.0)

    async with bench(Played(evaluate=broken)) as b:
        rollout = await b.run("r")
        assert (rollout.state, rollout.reward) == (RolloutState.FAILED, None)
        assert rollout.error.code == "internal_error"
        assert (await b.run("another")).state is RolloutState.COMPLETED


@pytest.mark.slow
async def test_rollouts_wait_for_their_pool_and_lose_nothing_by_it():
    settings = SETTINGS.model_copy(update={"init_queue": 4})
    async with bench(Played(image="any"), settings=settings) as b:
        b.policies.serve()
        await b.submit_all(8, init_seconds=1.0)
        for i in range(8):
            await b.submit(f"j{i}", pool="judge", init_seconds=1.0)
        await anyio.sleep(1.2)
        assert await b.store.counts() == {RolloutState.QUEUED: 16}
        assert b.provider.started == 0
        b.policies.serve("judge")
        judged = [await b.result(f"j{i}") for i in range(8)]
        assert {(r.state, r.attempt) for r in judged} == {(RolloutState.COMPLETED, 1)}
        assert (await b.store.counts())[RolloutState.QUEUED] == 8, "nobody waits for another's pool"
        b.policies.serve("policy")
        served = await b.results(8)
        assert {(r.state, r.attempt) for r in served} == {(RolloutState.COMPLETED, 1)}
        assert not any(r.retries for r in served)
        await b.idle()


@pytest.mark.parametrize(
    ("of_sub_agents", "left"), [(None, []), (ParallelSettings(), ["policy"])], ids=["own", "of sub-agents"]
)
async def test_a_pool_lost_before_an_attempt_begins_costs_no_attempt_and_no_place(of_sub_agents, left):
    release = anyio.Event()

    async def init(_: Episode) -> None:
        await release.wait()

    settings = SETTINGS.model_copy(update={"init_workers": 1})
    environment = Played(init=init, parallel=of_sub_agents)
    async with bench(environment, settings=settings, claims=ClaimRules(["played"])) as b:
        await b.submit_all(4)
        await until(lambda: b.pipeline.live() >= 4, 10)
        b.policies.serve(*left)
        await b.store.cancel("r3")
        release.set()
        assert (await b.result("r0")).state is RolloutState.COMPLETED
        await b.idle()
        assert await b.store.counts() == {
            RolloutState.COMPLETED: 1,
            RolloutState.QUEUED: 2,
            RolloutState.CANCELLED: 1,
        }
        b.policies.serve("policy", "frozen-1")
        assert {(one.state, one.attempt) for one in await b.results(3)} == {(RolloutState.COMPLETED, 1)}


@pytest.mark.slow
async def test_rollouts_wait_for_the_pool_of_their_sub_agents_and_lose_nothing_by_it(monkeypatch):
    async with bench(Played(parallel=ParallelSettings()), claims=ClaimRules(["played"])) as b:
        claim, asked = b.store.claim, 0

        async def counted(*args: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            return await claim(*args, **options)

        monkeypatch.setattr(b.store, "claim", counted)
        b.policies.serve("policy")
        await b.submit_all(8, init_seconds=1.0)
        await anyio.sleep(1.2)
        assert await b.store.counts() == {RolloutState.QUEUED: 8}
        assert asked < 30, "they are not leased and handed back again and again"
        b.policies.serve("frozen-1")
        await anyio.sleep(0.1)
        assert await b.store.counts() == {RolloutState.QUEUED: 8}, "their own pool is not in service"
        b.policies.serve("policy", "frozen-1")
        served = await b.results(8)
        assert {(r.state, r.attempt) for r in served} == {(RolloutState.COMPLETED, 1)}
        assert not any(r.retries for r in served)
        await b.idle()


async def test_a_stage_grows_and_shrinks_while_it_works():
    gate = anyio.Semaphore(0)
    working = most = 0

    async def run(_: Episode) -> None:
        nonlocal working, most
        working += 1
        most = max(most, working)
        try:
            await gate.acquire()
        finally:
            working -= 1

    async with bench(Played(run=run)) as b:
        stage = b.context.stages.rollout
        await b.submit_all(20)
        await until(lambda: working == 2)
        stage.resize(places=4, workers=6)
        await until(lambda: working == 6)
        stage.resize(places=1, workers=1)
        assert (stage.workers.size, stage.workers.in_use) == (1, 6)
        for left in (5, 4, 3, 2, 1):
            gate.release()
            await until(lambda left=left: working == left)
        most = 0
        for _ in range(3):
            gate.release()
            await anyio.sleep(0.02)
        assert most <= 1
        for _ in range(20):
            gate.release()
        assert {one.state for one in await b.results(20)} == {RolloutState.COMPLETED}
        await b.idle()


@given(st.lists(st.one_of(st.integers(1, 6).map(lambda n: ("resize", n)), st.just(("take", 0)), st.just(("give", 0)))))
def test_seats_are_counted_right_through_any_change(steps):
    async def main() -> None:
        semaphore, held, size = ResizableSemaphore(3), 0, 3
        for step, number in steps:
            if step == "resize":
                semaphore.resize(number)
                size = number
            elif step == "give" and held:
                semaphore.release()
                held -= 1
            elif step == "take":
                if held < size:
                    semaphore.acquire_nowait()
                    held += 1
                else:
                    with pytest.raises(anyio.WouldBlock):
                        semaphore.acquire_nowait()
            assert (semaphore.in_use, semaphore.size) == (held, size)

    anyio.run(main)


async def test_stop_begins_nothing_until_start():
    async with bench(Played()) as b:
        b.pipeline.stop()
        await b.submit("r")
        with anyio.move_on_after(0.2):
            await b.store.wait_for_result("r")
            pytest.fail("it was begun after the stop")
        b.pipeline.start()
        assert (await b.result("r")).state is RolloutState.COMPLETED


@settings(max_examples=30, deadline=None)
@given(workers=st.integers(1, 3), places=st.integers(1, 3), cancels=st.lists(st.integers(0, 11), max_size=8))
def test_slots_are_never_lost_whoever_is_cancelled(workers, places, cancels):
    """Send twelve rollouts through two stages and cancel some at arbitrary points: every slot is returned."""

    async def main() -> None:
        metrics = Metrics()
        first, second = (
            StageLimiter(stage, places=places, workers=workers, metrics=metrics)
            for stage in (Stage.INIT, Stage.ROLLOUT)
        )
        working: dict[Stage, int] = {Stage.INIT: 0, Stage.ROLLOUT: 0}

        async def one(scope: anyio.CancelScope) -> None:
            slot = Slot()
            try:
                with scope:
                    for limiter in (first, second):
                        await limiter.enter(slot, since=0.0)
                        working[limiter.stage] += 1
                        try:
                            assert working[limiter.stage] <= workers
                            await anyio.lowlevel.checkpoint()
                        finally:
                            working[limiter.stage] -= 1
            finally:
                slot.free()

        scopes = [anyio.CancelScope() for _ in range(12)]
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for scope in scopes:
                    tasks.start_soon(one, scope)
                for index in cancels:
                    await anyio.lowlevel.checkpoint()
                    scopes[index].cancel()
        assert first.idle
        assert second.idle

    anyio.run(main)

"""Real programs are agents: eight of them, each in its own sandbox, through pauses, lost engines and long tasks.

All of their rollouts run at the same time in one service, once for all tests of this module.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from pydantic import HttpUrl
from transformers import AutoTokenizer

from api_schemas.inference import BackendSpec
from api_schemas.rollouts import Rollout, RolloutRequest, StopReason
from api_schemas.tasks import Task
from api_schemas.trajectories import ForkReason, Segment
from rollout_client.client import RolloutClient
from rollout_service.gateway.contract import ModelCall
from rollout_service.settings import PipelineSettings, PoolSettings, SandboxesSettings
from rollout_service.testing import ScriptedEngine
from rollout_service.tokens import ChatRenderer, check_invariants
from sandboxes import ApptainerConfig
from sandboxes.config import PressureConfig
from tests.support.gateway.jobs import (
    CONTEXT,
    HELD_SECONDS,
    IMAGE,
    IMAGES,
    VOCABULARY,
    Job,
    JobsScript,
    write_environment,
    write_model,
)
from tests.support.gateway.requests import RequestLog, rendered
from tests.support.gateway.service import gateway_service
from tests.support.samples import sampled_by_turn

HARNESSES = ("codex", "claude_code", "qwen_code", "opencode", "gemini_cli", "mini_swe_agent", "pi", "openhands_sdk")
UPDATE_SECONDS = 90.0
BEGUN_SECONDS = 5.0
AGENT_SECONDS = 480.0
SCENARIOS = {
    "updated": {"steps": 3, "held": 1},
    "failing": {"steps": 3, "held": 1},
    "long": {"steps": 31, "output_bytes": 20_000},
    "medium": {"steps": 8},
    "short": {"steps": 3},
}
"""The jobs of each harness. Those with an answer that is held come first: all of them are under way at once."""
AT_ONCE = 18
"""How many programs run at once: as many as are held, and some more."""
JOBS = [Job(harness, scenario, **fields) for scenario, fields in SCENARIOS.items() for harness in HARNESSES]
FORKS = {("gemini_cli", "long"): {ForkReason.FIRST: 1, ForkReason.HISTORY_EDITED: 3}}
"""The segments of programs that edit their history: here, to leave out old outputs. All others have one."""

pytestmark = [
    pytest.mark.apptainer,
    pytest.mark.harnesses,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("harnesses"),
    pytest.mark.slow(seconds=300),
]


@dataclass(slots=True)
class Outcome:
    """What came of all jobs."""

    model: Path
    script: JobsScript
    log: RequestLog
    engines: dict[str, ScriptedEngine]
    rollouts: dict[str, Rollout] = field(default_factory=dict)

    def of(self, harness: str, scenario: str) -> Rollout:
        """Return the rollout of a job."""
        return self.rollouts[f"{harness}-{scenario}"]

    def calls(self, harness: str, scenario: str) -> list[ModelCall]:
        """Return the calls of a job's program."""
        return self.log.calls_naming(f"{harness}-{scenario}")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """Run all jobs."""
    with pytest.MonkeyPatch.context() as patch:
        log = RequestLog()
        patch.setattr("rollout_service.gateway.gateway.GatewayApp", log.app)
        yield anyio.run(run_all, tmp_path_factory.mktemp("harnesses"), log)


async def run_all(folder: Path, log: RequestLog) -> Outcome:
    model = write_model(folder / "model")
    script = JobsScript(ChatRenderer.load(model), JOBS)
    options = {"model_path": model, "vocab_size": VOCABULARY, "context_length": CONTEXT, "latency": 0.2}
    engines = {
        "policy": ScriptedEngine(script, **options),
        "updated": ScriptedEngine(script, **options, update_seconds=UPDATE_SECONDS),
        "failing": ScriptedEngine(script, **options),
        "standby": ScriptedEngine(script, **options),
    }
    found = Outcome(model, script, log, engines)
    environments = [
        write_environment(folder / name, name, IMAGES.get(name, IMAGE), AGENT_SECONDS) for name in HARNESSES
    ]
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            await stack.enter_async_context(engine)
        client = await stack.enter_async_context(service(folder / "state", environments))
        for name in ("policy", "updated", "failing"):
            await add(client, engines[name], name)
        async with anyio.create_task_group() as tasks:
            for job in JOBS:
                await submit(client, job)
                tasks.start_soon(wait, client, job, found)
            await interrupt(client, found)
    return found


@asynccontextmanager
async def service(state: Path, environments: Sequence[Path]) -> AsyncIterator[RolloutClient]:
    """Run a service in this process."""
    settings = {
        "sandbox": ApptainerConfig(),
        "environments": list(environments),
        "sandboxes": SandboxesSettings(pressure=PressureConfig(enabled=False)),
        "pipeline": PipelineSettings(rollout_workers=AT_ONCE, max_attempts=1),
        "pools": {name: PoolSettings(stall_seconds=HELD_SECONDS) for name in ("updated", "failing")},
    }
    async with gateway_service(state, [], **settings) as running:
        yield running.client


async def add(client: RolloutClient, engine: ScriptedEngine, pool: str) -> None:
    await client.add_backend(BackendSpec(url=HttpUrl(engine.url), pool=pool))


async def submit(client: RolloutClient, job: Job) -> None:
    pool = job.scenario if job.held is not None else "policy"
    task = Task(environment=job.harness, instance={"job": job.name, "steps": job.steps})
    await client.submit(RolloutRequest(rollout_id=job.name, task=task, pool=pool))


async def wait(client: RolloutClient, job: Job, found: Outcome) -> None:
    found.rollouts[job.name] = await client.wait(job.name)


async def interrupt(client: RolloutClient, found: Outcome) -> None:
    """Load new weights into one pool, and end an engine of another, in the middle of an answer of every harness."""
    script = found.script
    while not is_interruptible(script):
        for job in JOBS:
            if job.held is not None and (early := found.rollouts.get(job.name)):
                pytest.fail(f"{job.name} ended early: {early.error}; {early.program and early.program.output[-2_000:]}")
        await anyio.sleep(0.1)
    script.released = True
    await add(client, found.engines["standby"], "failing")
    await found.engines["failing"].die()
    await client.update_weights(str(found.model), 1, pool="updated")


def is_interruptible(script: JobsScript) -> bool:
    """Return whether all answers that are held have begun long enough ago to have some tokens."""
    expected = sum(job.held is not None for job in JOBS)
    return len(script.held) == expected and anyio.current_time() - max(script.held.values()) > BEGUN_SECONDS


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("harness", HARNESSES)
def test_a_program_takes_every_step_and_each_token_is_recorded_once(outcome, harness, scenario):
    rollout, job = outcome.of(harness, scenario), job_of(harness, scenario)
    assert rollout.reward == 1.0, (rollout.error, rollout.program.output[-2_000:])
    assert (rollout.stop_reason, rollout.program.exit_code) == (StopReason.FINISHED, 0)
    trajectory = rollout.trajectory
    check_invariants(trajectory)
    assert sampled_by_turn(trajectory) == dict(enumerate(outcome.script.answers(job)))
    assert rollout.usage.turns == job.steps + 1
    assert trajectory.untrained == []
    asked_again = scenario == "failing"  # the rest of the held answer, of another engine
    assert outcome.script.asked[job.name] == rollout.usage.turns + asked_again


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("harness", HARNESSES)
def test_the_turns_of_a_program_are_in_one_segment(outcome, harness, scenario):
    trajectory = outcome.of(harness, scenario).trajectory
    assert trajectory.fork_counts == FORKS.get((harness, scenario), {ForkReason.FIRST: 1})


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("harness", HARNESSES)
def test_a_segment_begins_with_what_the_models_template_renders(outcome, harness, scenario):
    rollout, tokenizer = outcome.of(harness, scenario), AutoTokenizer.from_pretrained(outcome.model)
    calls = outcome.calls(harness, scenario)
    assert len(calls) == rollout.usage.turns, "it repeated no request"
    for segment in rollout.trajectory.segments:
        turn, begin = first_turn(segment)
        assert segment.token_ids[:begin] == rendered(tokenizer, calls[turn])


@pytest.mark.parametrize("harness", HARNESSES)
def test_a_weight_update_of_90_seconds_is_waited_for(outcome, harness):
    rollout = outcome.of(harness, "updated")
    assert rollout.program.seconds > UPDATE_SECONDS
    (segment,) = rollout.trajectory.segments
    held = [version for version, turn in zip(segment.versions, segment.turn_ids, strict=True) if turn == 1]
    assert held == sorted(held)
    assert set(held) == {0, 1}


def test_another_engine_goes_on_where_one_was_lost(outcome):
    assert outcome.engines["failing"].died.is_set()
    assert outcome.engines["standby"].requests > len(HARNESSES), "the answers that were cut off, and those after them"


def job_of(harness: str, scenario: str) -> Job:
    return next(job for job in JOBS if job.name == f"{harness}-{scenario}")


def first_turn(segment: Segment) -> tuple[int, int]:
    """Return the first turn of a segment, and how many ids are before what it sampled."""
    begin = segment.loss_mask.index(1)
    return segment.turn_ids[begin], begin

"""Rollouts of a scripted agent and engine, in services that end and begin again on one store."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
from prometheus_client import generate_latest

from api_schemas.rollouts import BranchPoint, Rollout, RolloutRequest, StopReason
from api_schemas.tasks import Limits, Task
from api_schemas.trajectories import ForkReason, Message
from rollout_service.engines import contract as inference
from rollout_service.engines.errors import BackendUnreachable
from rollout_service.environments.contract import Environment, EnvironmentSpec, Replayable
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.episodes import Episode, Score
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.pipeline.turn_writer import TurnWriter
from rollout_service.settings import PipelineSettings
from rollout_service.store.sqlite.store import SqliteStore
from tests.support import samples
from tests.support.attempts import OpenedPolicies, attempt_context
from tests.support.tokens.characters import STOP, CharRenderer, session

SETTINGS = PipelineSettings(retry_seconds=0.01, drain_seconds=0.0, lease_seconds=30)
Work = Callable[[Episode], Awaitable[StopReason]]


@dataclass
class CountingEngine:
    """Answers with the number of turns that the prompt already has; dies, hangs or fails at chosen turns."""

    sampled: int = 0
    mark: str = ""
    """A text that it adds to its answers from the one numbered `marks_from` on."""
    marks_from: int = 0
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
        mark = self.mark if self.sampled >= self.marks_from else ""
        self.sampled += 1
        ids = [*map(ord, f"turn {number}{mark}"), STOP]
        return samples.generation(
            ids,
            logprobs=[-0.1 * (number + 1)] * len(ids),
            versions=[number] * len(ids),
            prompt_tokens=len(request.input_ids),
            cached_tokens=number,
            kept_kv_versions=frozenset({number}),
        )


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

    async def submit(self, rollout_id: str = "r", *, branch_of: BranchPoint | None = None, **limits: float) -> None:
        request = RolloutRequest(
            rollout_id=rollout_id,
            task=Task(environment="worked"),
            limits=Limits.model_validate(limits),
            branch_of=branch_of,
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
        policies = OpenedPolicies(
            lambda tools, turns: session(
                self.engine, renderer or CharRenderer(), tools=tools, context_length=10_000, turns=turns
            )
        )
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

    async def finish(self, work: Work = FOUR, rollout_id: str = "r", **how) -> Rollout:
        """Let a service end the rollout."""
        async with self.service(work, **how):
            with anyio.fail_after(20):
                rollout = await self.store.wait_for_result(rollout_id)
        return rollout.model_copy(update={"trajectory": await self.store.trajectory(rollout_id)})

    async def resume_events(self) -> list[dict]:
        return [e.data for e in await self.store.events(after=0) if e.kind == "rollout.resume"]


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    async with await SqliteStore.open(":memory:") as store:
        yield Bench(store)

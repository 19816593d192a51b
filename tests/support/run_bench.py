"""A store, a manager of runs and a worker whose rollouts end as a test says."""

import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import Rollout, RolloutState, Usage
from api_schemas.runs import Batch, DatasetTasks, FileTasks, InlineTasks, RunRequest
from api_schemas.tasks import Task
from api_schemas.trajectories import ForkReason
from rollout_service.base.errors import StoreError
from rollout_service.environments.contract import Environment
from rollout_service.episodes import Score
from rollout_service.groups.filters import FilterRegistry
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.runs import Delivery, RunManager, RunOverError
from rollout_service.runs.api import CheckEnvironment, RunService
from rollout_service.runs.dataset import open_dataset, reopening
from rollout_service.runs.task_files import open_file
from rollout_service.store import Lease, Store
from rollout_service.store.cluster_contract import RoleLease
from rollout_service.store.runs_contract import BatchLease, BatchLeaseRequest
from rollout_service.store.sqlite import SqliteStore
from tests.support.samples import segment, trajectory
from tests.support.store.rollouts import ended

LEASE = RoleLease("runs", "w", 1)
GONE = ErrorInfo(code="engine_gone", boundary=Boundary.INFERENCE, message="gone", retryable=True)
BROKEN = ErrorInfo(code="environment_failed", boundary=Boundary.ENVIRONMENT, message="broken")
Play = Callable[[Lease], float | Score | ErrorInfo | None]
"""The outcome of a rollout: its reward, alone or with its parts, an error, or None while it runs."""


def place(lease: Lease) -> tuple[int, int, int]:
    """Return the task number, sample and retry of a rollout."""
    number, sample, *retry = lease.rollout_id.split(".")[1:]
    return int(number), int(sample), int(retry[0]) if retry else 0


def alternate(lease: Lease) -> float:
    """Return rewards that make odd tasks informative and even ones not."""
    number, sample, _ = place(lease)
    return float(number % 2 and sample % 2)


async def never_reopened(*_: object) -> None:
    raise AssertionError("the run has all its tasks")


def run_manager(
    store: Store,
    metrics: Metrics | None = None,
    *,
    places: int = 64,
    reopen: Any = never_reopened,
    version: Callable[[], int] = lambda: 0,
) -> RunManager:
    return RunManager(
        store,
        FilterRegistry(),
        places=places,
        reopen=reopen,
        pool_version=lambda _: version(),
        metrics=metrics or Metrics(),
    )


async def no_environment(name: str) -> Environment:
    raise AssertionError(name)


def run_service(
    store: Store, manager: RunManager, check_environment: CheckEnvironment = no_environment, **options: Any
) -> RunService:
    return RunService(
        store.runs, lambda _: manager, check_environment=check_environment, check_pool=lambda _: None, **options
    )


async def arrays_of(delivery: Delivery, leased: BatchLease) -> bytes:
    sent: list[bytes] = []

    async def send(piece: memoryview) -> None:
        sent.append(bytes(piece))

    await (await delivery.as_arrays(leased)).write(send)
    return b"".join(sent)


class Bench:
    """A store, a manager and a worker."""

    def __init__(self, store: SqliteStore, play: Play, *, places: int) -> None:
        self.store, self.play = store, play
        self.version = 0
        self.sampled_by: Callable[[Lease], int] = lambda _: self.version
        """The version that samples a rollout, as a function of its lease."""
        self.turns = 1
        """How many turns a rollout has; each is less likely than the one before."""
        self.shortened: Collection[str] = ()
        """The rollouts whose history is shortened."""
        self.begun: list[str] = []
        self.environments: dict[str, Environment] = {}
        self.metrics = Metrics()
        self.manager = run_manager(
            store,
            self.metrics,
            places=places,
            reopen=reopening(self.environments.__getitem__),
            version=lambda: self.version,
        )
        self.delivery = Delivery(store.runs, lambda _: self.manager)
        self.service = run_service(store, self.manager)
        self._held: dict[str, Lease] = {}

    async def create(self, run_id: str = "a", tasks: int = 8, **fields: object) -> None:
        source = InlineTasks(tasks=[Task(environment="calc", instance={"n": n}) for n in range(tasks)])
        given = {"run_id": run_id, "source": source, "batch_size": 2, "group_size": 4} | fields
        request = RunRequest.model_validate(given)
        digest = None
        if isinstance(request.source, FileTasks):
            rows = open_file(request.source, lambda _: None)
            tasks, digest = len(rows), rows.digest
        if isinstance(request.source, DatasetTasks):
            dataset = open_dataset(request.source, self.environments[request.source.environment])
            tasks, digest = len(dataset), dataset.digest
        await self.store.runs.create(request, tasks=tasks, digest=digest, version=request.version)

    async def lease(self, run_id: str = "a", *, timeout: float = 30, key: str = "k") -> Batch | None:
        leased = await self.delivery.lease(BatchLeaseRequest(run_id, key, 60), version=None, timeout=timeout)
        if leased is None:
            return None
        return Batch.model_validate_json(b"".join([part async for part in self.delivery.as_json(leased)]))

    async def next(self, run_id: str = "a") -> Batch:
        """Lease the next batch, acknowledge it and return it."""
        batch = await self.lease(run_id)
        await self.delivery.acknowledge(run_id, batch.batch_id)
        return batch

    async def all(self, run_id: str = "a") -> list[Batch]:
        batches = []
        while True:
            try:
                batches.append(await self.next(run_id))
            except RunOverError:
                return batches

    async def work(self) -> None:
        await self.store.release("w")
        while True:
            with suppress(StoreError):
                await self.work_once()
            with anyio.move_on_after(0.02):
                await self.store.wait_for_work()

    async def work_once(self) -> None:
        for lease in await self.store.claim("w", limit=100, lease_seconds=1e6):
            self.begun.append(lease.rollout_id)
            self._held[lease.rollout_id] = lease
            await self.store.advance(lease, "w", RolloutState.ROLLOUT)
        cancelled = set(await self.store.cancel_requested("w"))
        for lease in list(self._held.values()):
            end = RolloutState.CANCELLED if lease.rollout_id in cancelled else self.play(lease)
            if end is not None:
                made = result(lease, end, self.sampled_by(lease), self.turns)
                if lease.rollout_id in self.shortened and made.trajectory is not None:
                    forks = {"fork_counts": {ForkReason.COMPACTION: 1}}
                    made = made.model_copy(update={"trajectory": made.trajectory.model_copy(update=forks)})
                await self.store.finish(lease, "w", made)
                del self._held[lease.rollout_id]


def result(lease: Lease, end: RolloutState | ErrorInfo | Score | float, version: int, turns: int = 1) -> Rollout:
    state = RolloutState.COMPLETED
    score = Score(end) if isinstance(end, float) else end
    if isinstance(end, RolloutState):
        state = end
    elif isinstance(end, ErrorInfo):
        state = RolloutState.FAILED
    sampled = range(turns)
    made = segment(
        [1, *(2 for _ in sampled)],
        [0, *(1 for _ in sampled)],
        versions=[-1, *(version for _ in sampled)],
        turn_ids=[-1, *sampled],
        logprobs=[0.0, *(-0.5 * (turn + 1) for turn in sampled)],
    )
    return ended(
        lease,
        state,
        reward=score.reward if isinstance(score, Score) else None,
        reward_parts=score.parts if isinstance(score, Score) else {},
        error=end if isinstance(end, ErrorInfo) else None,
        usage=Usage(sampled_tokens=100 * (1 + place(lease)[1])),
        trajectory=trajectory(made, turns=turns),
    )


@asynccontextmanager
async def bench(
    play: Play = alternate,
    *,
    places: int = 64,
    path: Path | str = ":memory:",
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[Bench]:
    with anyio.fail_after(60):
        async with await SqliteStore.open(path, clock=clock) as store:
            made = Bench(store, play, places=places)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(made.manager.manage, LEASE)
                tasks.start_soon(made.manager.prune, LEASE)
                tasks.start_soon(made.work)
                yield made
                tasks.cancel_scope.cancel()

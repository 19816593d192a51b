"""A run of live sessions at work: real stores, closing, delivery and attempts, without engines."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, cast

import anyio

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.rollouts.sessions import ClosedBecause
from api_schemas.runs import Batch, InlineTasks, RunRequest
from rollout_service.base.errors import describe
from rollout_service.cluster.identity import is_gone
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.live.parts.delivery import PartDelivery
from rollout_service.live.parts.environment import SessionEnvironment, SessionParts
from rollout_service.live.parts.work import PartCloser
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.pipeline.attempt import Attempt
from rollout_service.runs import Delivery
from rollout_service.settings import PipelineSettings
from rollout_service.store import Store
from rollout_service.store.contract import Lease
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.runs_contract import BatchLeaseRequest, RunStore
from rollout_service.store.sqlite import SqliteStore
from tests.support.attempts import attempt_context
from tests.support.live.store import a_session, a_state, judged
from tests.support.run_bench import run_manager
from tests.unit.live.test_replay import RENDERER, Stored


class NoEngines:
    """Pools that are in service and never asked for anything."""

    def in_service(self) -> tuple[frozenset[str], anyio.Event]:
        return frozenset({"policy"}), anyio.Event()

    def close(self, request: object) -> None:
        """Do nothing: nothing was opened."""


class LiveBench:
    """The parts of a service that make batches of sessions."""

    def __init__(self, store: Store, live: SqliteLiveStore, node: str | None = None) -> None:
        """Create it; `node` names this node if others share the store of runs."""
        self.store, self.live, self.node = store, live, node
        self.now = 1_000.0
        self.environment = SessionEnvironment(SessionParts(live, store.runs, lambda _: RENDERER, node=node))
        environments = EnvironmentRegistry()
        environments.add(self.environment, "tests")
        context = attempt_context(store, cast(Any, None), environments, cast(Any, NoEngines()), PipelineSettings())
        self.context = replace(context, owner=node or context.owner)
        self.manager = run_manager(store)
        self.batches = Delivery(store.runs, lambda _: self.manager)
        self.restart()

    def restart(self, live: SqliteLiveStore | None = None, runs: RunStore | None = None) -> None:
        """Begin anew, as after a crash; `live` and `runs` are what the loops see."""
        live, runs = live or self.live, runs or self.store.runs
        self.closer = PartCloser(live, runs, clock=lambda: self.now)
        self.delivery = PartDelivery(live, runs, node=self.node, clock=lambda: self.now)

    def move(self, live: SqliteLiveStore) -> None:
        """Go on as another node, with a store of sessions of its own."""
        self.live = live
        self.environment.recorded = SessionParts(live, self.store.runs, lambda _: RENDERER)
        self.restart()

    async def create_run(self, run_id: str = "run", live: dict[str, Any] | None = None, **fields: Any) -> None:
        given: dict[str, Any] = {
            "run_id": run_id,
            "source": InlineTasks(open=True),
            "batch_size": 1,
            "group_size": 1,
            "live": {"close_turns": 2} | (live or {}),
        }
        request = RunRequest.model_validate(given | fields)
        await self.store.runs.create(request, tasks=0, digest=None, version=0)

    async def serve(self, session_id: str, values: list[float | None], **fields: Any) -> Stored:
        """Serve a session with a main turn for each value, None for one without a next state; then end it."""
        ended = fields.pop("ended", True)
        await self.live.open(a_session(session_id, **{"retention_seconds": 1e6} | fields))
        stored = _stored(session_id, len(values))
        for number, value in enumerate(values):
            record = stored.records[number]
            await self.live.record(
                replace(record, turn=number, session_id=session_id, answer=f"answer {number}", delivered=True)
            )
            if value is not None:
                await self.live.follow(session_id, number, a_state(f"said after {number}"))
                await self.live.mark(session_id, number, judged(value))
        if ended:
            await self.live.close_session(session_id, ClosedBecause.EXPLICIT, self.now)
        return stored

    async def drive(self) -> None:
        """Let everything work until nothing changes."""
        for _ in range(6):
            await self.closer.step()
            await self.delivery.step()
            await self.manager.step()
            await self.work()
            await self.manager.step()

    async def work(self, limit: int = 64) -> None:
        """Attempt the rollouts that wait, but those whose sessions another node has."""
        owner = self.context.owner
        for lease in await self.store.claim(owner, limit=limit, lease_seconds=60):
            if lease.request.task.instance.get("node") != self.node:
                await self.store.release(owner, [lease.rollout_id])
                continue
            await self.context.stages.init.places.acquire()
            attempt = Attempt(self.context, lease)
            try:
                result = attempt.result(RolloutState.COMPLETED, score=await attempt.run())
            except Exception as error:  # noqa: BLE001 - it is the rollout's
                result = attempt.result(RolloutState.FAILED, error=describe(error))
            finally:
                await attempt.release()
            await self.store.finish(lease, owner, result)

    async def failed(self, lease: Lease, error: ErrorInfo) -> Rollout:
        """Return the result of an attempt that failed."""
        await self.context.stages.init.places.acquire()
        attempt = Attempt(self.context, lease)
        await attempt.release()
        return attempt.result(RolloutState.FAILED, error=error)

    async def lease(self, run_id: str = "run", key: str = "k") -> Batch | None:
        leased = await self.batches.lease(BatchLeaseRequest(run_id, key, 60), version=None, timeout=0.01)
        if leased is None:
            return None
        pieces = [piece async for piece in self.batches.as_json(leased)]
        return Batch.model_validate_json(b"".join(pieces))


def _stored(seed: str, turns: int) -> Stored:
    """Return a session of which everything was kept."""
    for number in count():
        stored = Stored(Random(f"{seed} {number}"), is_plain=True)
        for _ in range(turns):
            stored.step()
        if all(record.body for record in stored.records):
            return stored
    raise AssertionError("some seed keeps everything")


@asynccontextmanager
async def live_bench(folder: Path | None = None, *, redis: RedisConfig | None = None) -> AsyncIterator[LiveBench]:
    """Open both stores, in a folder or in memory; that of runs in a Redis, if one is given."""
    main = ":memory:" if folder is None else folder / "store.sqlite3"
    live = ":memory:" if folder is None else folder / "live.sqlite3"
    async with AsyncExitStack() as stack:
        store: Store
        if redis is not None:
            store = await stack.enter_async_context(await RedisStore.open(redis, is_gone=is_gone))
        else:
            store = await stack.enter_async_context(await SqliteStore.open(main))
        yield LiveBench(store, await stack.enter_async_context(SqliteLiveStore(live)))

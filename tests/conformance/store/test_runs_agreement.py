"""Whatever is asked of runs, in whatever order, a store in Redis answers as SQLite does and records the same events."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api_schemas.rollouts import RolloutRequest
from api_schemas.runs import FileTasks, RunState
from api_schemas.runs.auxiliary import RewardPart, RewardWeights
from api_schemas.runs.history import GroupRow
from api_schemas.views.summaries import SummaryOrder
from rollout_service.base.errors import RequestError
from rollout_service.cluster.identity import is_gone
from rollout_service.settings import RetentionSettings
from rollout_service.store import Store
from rollout_service.store.lists_contract import GroupSelection
from rollout_service.store.redis.store import RedisStore
from rollout_service.store.runs_contract import (
    BatchLease,
    BatchLeaseRequest,
    ClosedSample,
    GroupClosure,
    OpenGroup,
)
from rollout_service.store.sqlite import SqliteStore
from tests.support.clocks import ManualClock
from tests.support.runs import TASKS, create_run, end_all, new_group

pytestmark = pytest.mark.redis

SELECTIONS = [
    GroupSelection(),
    *(GroupSelection(state=state) for state in ("open", "ready", "batched", "acknowledged", "dropped")),
    *(GroupSelection(state="dropped", reason=reason) for reason in ("zero_variance", "surplus", "stale")),
]
Step = Callable[[Store], Awaitable[Any]]
NUMBERS = st.integers(0, 5)
KEYS = st.sampled_from(["k", "l"])
VERSIONS = st.integers(0, 3)


def closure(number: int, reason: str | None, usable: list[bool], version: int) -> GroupClosure:
    """Return a closure; a sample that is not usable is stale."""
    samples = [
        ClosedSample(n, f"a.{number}.{n}", one, None if one else "stale", float(n) if one else None, None)
        for n, one in enumerate(usable)
    ]
    weights = RewardWeights(perf=1.0, parallel=0.3 / (1 + version), finish=0.0, at_version=version)
    parts = (RewardPart.PERF, RewardPart.PARALLEL)
    return GroupClosure(number, reason, samples, 0.5, None, version, version, weights, parts[0], parts)


async def start(store: Store, count: int) -> int:
    cursor = (await store.runs.get("a")).cursor
    return await store.runs.start_groups("a", [new_group(cursor + n) for n in range(count)])


async def retry(store: Store, number: int, sample: int) -> None:
    groups = {group.number: group for group in await store.runs.open_groups("a")}
    if number in groups and groups[number].members[sample].state.terminal:
        again = f"{groups[number].members[sample].rollout_id}.1"
        await store.runs.retry_sample("a", number, sample, RolloutRequest(rollout_id=again, task=TASKS[0]))


async def close(store: Store, number: int, reason: str | None, usable: list[bool], version: int) -> None:
    under_way = [
        group.number
        for group in await store.runs.open_groups("a")
        if not all(member.state.terminal for member in group.members)
    ]
    if number not in under_way:  # as the run manager does
        await store.runs.close_group("a", closure(number, reason, usable, version))


async def mask(store: Store, bound: int, reason: str | None) -> list[OpenGroup]:
    groups = list(await store.runs.stale_groups("a", bound))
    for group in groups:
        await store.runs.reclose_group("a", closure(group.number, reason, [reason is None, False], bound))
    return groups


async def lease(store: Store, key: str, seconds: float, allow_stale: bool) -> Any:
    leased = await store.runs.lease(BatchLeaseRequest("a", key, seconds, allow_stale))
    if isinstance(leased, BatchLease):
        heads = await store.runs.group_heads("a", leased.groups)
        return leased, [(head.number, head.samples, head.tokens) for head in heads]
    return leased


def steps() -> st.SearchStrategy[tuple[str, Step]]:
    """Draw one call with its name, for every kind of call that changes something."""
    reasons = st.sampled_from([None, None, "zero_variance"])
    usable = st.lists(st.booleans(), min_size=2, max_size=2)
    limits = st.one_of(st.none(), st.sampled_from([0, 1, 700, 10**6]))
    ages = st.one_of(st.none(), st.sampled_from([0.0, 5.0, 40.0]))

    def step(name: str, call: Callable[..., Awaitable[Any]], *drawn: st.SearchStrategy[Any]) -> Any:
        return st.tuples(*drawn).map(lambda given: (f"{name}{given}", lambda store: call(store, *given)))

    return st.one_of(
        step("start", start, st.integers(1, 3)),
        step("end", end_all, VERSIONS),
        step("retry", retry, NUMBERS, st.integers(0, 1)),
        step("cut", lambda s, n: s.runs.mark_stragglers("a", n, [1]), NUMBERS),
        step("cancel", lambda s: s.runs.cancel_groups("a", "cancelled")),
        step("close", close, NUMBERS, reasons, usable, VERSIONS),
        step("mask", mask, VERSIONS, st.sampled_from([None, "stale"])),
        step("lease", lease, KEYS, st.sampled_from([1.0, 30.0]), st.booleans()),
        step("renew", lambda s, n, k: s.runs.renew_batch("a", n, key=k, seconds=9), NUMBERS, KEYS),
        step("acknowledge", lambda s, n: s.runs.acknowledge("a", n), NUMBERS),
        step("return", lambda s, n, k: s.runs.give_back("a", n, key=k), NUMBERS, KEYS),
        step("version", lambda s, n: s.runs.update("a", version=n), VERSIONS),
        step("state", lambda s, to: s.runs.update("a", state=to), st.sampled_from(list(RunState)[:3])),
        step("prune", lambda s, t, n: s.runs.prune("a", seconds=t, max_bytes=n), ages, limits),
        step(
            "delete",
            lambda s, runs, groups: s.runs.delete_expired(
                RetentionSettings(ended_run_seconds=runs, settled_group_seconds=groups)
            ),
            ages,
            ages,
        ),
    )


@dataclass
class Pair:
    """Two stores that get the same calls at the same time."""

    sqlite: Store
    redis: Store
    clock: ManualClock
    log: list[str] = field(default_factory=list)

    async def do(self, name: str, step: Step) -> None:
        """Make one call to both, and compare all that can be seen afterwards."""
        self.clock.now += 1
        self.log.append(name)
        answers = [await answer(store, step) for store in (self.sqlite, self.redis)]
        assert answers[0] == answers[1], self.log
        seen = [await visible(store) for store in (self.sqlite, self.redis)]
        assert seen[0] == seen[1], self.log


async def answer(store: Store, step: Step) -> Any:
    try:
        return await step(store)
    except RequestError as error:
        return type(error), str(error)


async def pages(store: Store, which: GroupSelection) -> list[GroupRow]:
    """Return the rows of all groups that match, page by page, the same in both orders."""
    found: dict[SummaryOrder, list[GroupRow]] = {"newest": [], "oldest": []}
    for order, rows in found.items():
        page = await store.runs.group_page("a", which, order=order, limit=2)
        rows += page.groups
        while page.next_cursor is not None:
            page = await store.runs.group_page("a", which, order=order, cursor=page.next_cursor, limit=2)
            rows += page.groups
    assert found["oldest"] == found["newest"][::-1]
    return found["oldest"]


async def visible(store: Store) -> dict[str, Any]:
    """Return all that a store tells of the run."""
    runs = store.runs
    found: dict[str, Any] = {
        "runs": await runs.list(),
        "active": await runs.active(),
        "rollouts": (await store.list(limit=1_000)).rollouts,
        "events": [(one.kind, one.subject, one.data) for one in await store.events(after=0)],
    }
    if found["runs"]:
        closed = await runs.closed_groups("a")
        found |= {
            "open": await runs.open_groups("a"),
            "closed": closed,
            "states": await runs.group_states("a"),
            "ids": await runs.rollout_ids("a"),
            "groups": [await answer(store, lambda s, n=n: s.runs.group("a", n)) for n in closed],
            "pages": [await pages(store, which) for which in SELECTIONS],
            "history": [await runs.history("a", points=points) for points in (1, 2, 50)],
            "exported": [await runs.exported_samples("a", n) for n in closed],
        }
    return found


@pytest.mark.timeout(240)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(calls=st.lists(steps(), min_size=10, max_size=50), surplus=st.sampled_from(["carry_over", "cancel"]))
def test_redis_answers_as_sqlite_does(shared_redis, calls, surplus):
    async def compare() -> None:
        clock = ManualClock()
        async with AsyncExitStack() as stack:
            config = shared_redis.config()
            one = await stack.enter_async_context(await SqliteStore.open(":memory:", clock=clock))
            other = await stack.enter_async_context(await RedisStore.open(config, is_gone=is_gone, clock=clock))
            pair = Pair(one, other, clock)
            source = FileTasks(path="/x.jsonl", environment="calc", epochs=1)
            for store in (one, other):
                await create_run(store, source=source, surplus=surplus, max_staleness=1)
            for name, step in calls:
                await pair.do(name, step)

    anyio.run(compare)

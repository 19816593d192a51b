"""Every kind of store lists rollouts as a model does, whatever is asked for and however many pages it takes."""

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api_schemas.errors import ErrorInfo
from api_schemas.rollouts import (
    BranchPoint,
    Rollout,
    RolloutState,
    Span,
    Stage,
    StopReason,
    Usage,
)
from api_schemas.runs import FileTasks, RunState
from api_schemas.views.summaries import RolloutSummary, SummaryFilter
from rollout_service.base.errors import InvalidFieldError, NotFoundError
from rollout_service.cluster.identity import is_gone
from rollout_service.groups.statistics import GroupFigures
from rollout_service.settings import RetentionSettings
from rollout_service.store import Lease, Store
from rollout_service.store.lists_contract import GroupSelection
from rollout_service.store.redis.store import RedisStore
from rollout_service.store.runs_contract import BatchLeaseRequest, ClosedSample, GroupClosure, NewGroup
from rollout_service.store.sqlite import SqliteStore
from tests.support.clocks import ManualClock
from tests.support.runs import create_run, new_group
from tests.support.store.rollouts import ENGINE_GONE, ended, order

S = RolloutState
START = datetime.fromtimestamp(ManualClock().now, UTC)


def result(lease: Lease, *, reward: float | None) -> Rollout:
    """Return the result of a leased rollout with its figures; one without a reward failed."""
    span = Span(stage=Stage.ROLLOUT, attempt=1, started_at=START, queued_seconds=1.0, seconds=2.5)
    return ended(
        lease,
        S.FAILED if reward is None else S.COMPLETED,
        reward=reward,
        stop_reason=StopReason.ERROR if reward is None else StopReason.FINISHED,
        usage=Usage(turns=3, sampled_tokens=70, prompt_tokens=9),
        spans=[span, span.model_copy(update={"attempt": 2, "seconds": 0.5})],
    )


async def pages(store: Store, which: SummaryFilter, *, limit: int = 100, **asked: Any) -> list[RolloutSummary]:
    """Return all rows of a search, page by page."""
    page = await store.summaries(which, limit=limit, **asked)
    rows = page.rows
    while page.next_cursor is not None:
        page = await store.summaries(which, limit=limit, cursor=page.next_cursor, **asked)
        assert len(page.rows) <= limit
        rows += page.rows
    return rows


async def test_a_row_says_how_a_rollout_went(store, clock):
    await create_run(store)
    await store.runs.start_groups("a", [NewGroup(0, 0, [order("a.0.0", "math", pool="big")])])
    clock.now += 10
    (row,) = await pages(store, SummaryFilter())
    waiting = RolloutSummary(
        rollout_id="a.0.0",
        state=S.QUEUED,
        environment="math",
        pool="big",
        run_id="a",
        group=0,
        attempt=0,
        created_at=START,
        changed_at=START,
    )
    assert row == waiting
    (lease,) = await store.claim("w", limit=1, lease_seconds=60)
    await store.advance(lease, "w", S.INIT)
    assert await store.finish(lease, "w", result(lease, reward=0.25))
    (row,) = await pages(store, SummaryFilter())
    done = {
        "state": S.COMPLETED,
        "attempt": 1,
        "reward": 0.25,
        "stop_reason": StopReason.FINISHED,
        "changed_at": START + timedelta(seconds=10),
        "turns": 3,
        "tokens": 70,
        "seconds": 3.0,
    }
    assert row == waiting.model_copy(update=done)


async def test_a_row_says_where_a_branch_begins(store):
    point = BranchPoint(rollout_id="r", turn=3, reuse_results=True)
    branch = order("b").model_copy(update={"branch_of": point})
    await store.submit(order("r"))
    await store.submit(branch)
    await store.submit(branch)
    await create_run(store)
    of_a_run = order("a.0.0").model_copy(update={"branch_of": point})
    await store.runs.start_groups("a", [NewGroup(0, 0, [of_a_run])])
    rows = await pages(store, SummaryFilter())
    assert {row.rollout_id: row.branch_of for row in rows} == {"r": None, "b": point, "a.0.0": point}


async def test_a_rollout_that_never_began_has_no_figures(store):
    await store.submit(order("r"))
    await store.cancel("r")
    (row,) = await pages(store, SummaryFilter())
    assert (row.state, row.stop_reason) == (S.CANCELLED, StopReason.CANCELLED)
    assert (row.turns, row.tokens, row.seconds, row.run_id, row.group) == (None,) * 5


async def test_pages_stay_the_same_while_rollouts_arrive(store, clock):
    for number in range(5):
        clock.now += 1
        await store.submit(order(f"r{number}"))
    page = await store.summaries(SummaryFilter(), limit=2)
    found = [row.rollout_id for row in page.rows]
    for arrives in ("later", "latest", "last"):
        if page.next_cursor is None:
            break
        clock.now += 1
        await store.submit(order(arrives))
        page = await store.summaries(SummaryFilter(), limit=2, cursor=page.next_cursor)
        found += [row.rollout_id for row in page.rows]
    assert page.next_cursor is None
    old = [name for name in found if name.startswith("r")]
    assert old == ["r4", "r3", "r2", "r1", "r0"]
    assert found == old or len(store.shards) > 1, "those of a shard of which no page had any may be among them"
    assert page.matching == sum((await store.counts()).values())


async def test_how_many_match_is_told_only_where_it_is_known(store):
    for number in range(3):
        await store.submit(order(f"r{number}"))
    await store.cancel("r0")
    assert (await store.summaries(SummaryFilter(), limit=1)).matching == 3
    assert (await store.summaries(SummaryFilter(states=[S.QUEUED]), limit=1)).matching == 2
    assert (await store.summaries(SummaryFilter(text="r"), limit=1)).matching is None


@pytest.mark.parametrize("cursor", ["12", "o5", "n-1", "nn", "n1' OR 1", ""])
async def test_a_wrong_cursor_is_refused(store, cursor):
    with pytest.raises(InvalidFieldError) as refused:
        await store.summaries(SummaryFilter(), cursor=cursor)
    assert refused.value.fields[0].path == "query.cursor"


async def test_a_run_that_is_unknown_has_no_rollouts(store):
    await store.submit(order("b.0.0"))
    page = await store.summaries(SummaryFilter(run="b"))
    assert (page.rows, page.next_cursor) == ([], None)


async def test_a_search_that_finds_little_ends_and_goes_on(store, monkeypatch):
    for module in ("sqlite.store", "sqlite.lists", "redis.lists"):
        monkeypatch.setattr(f"rollout_service.store.{module}.ROWS_AT_ONCE", 3)
    for module in ("sqlite.store", "redis.lists"):
        monkeypatch.setattr(f"rollout_service.store.{module}.LOOKED_AT", 9)
    for number in range(25):
        await store.submit(order(f"r{number}", "rare" if number in (1, 13) else "calc"))
    await store.claim("w", limit=25, lease_seconds=60)
    which = SummaryFilter(since=START + timedelta(seconds=60))
    cursors, cursor, looks = set[str | None](), None, 0
    while looks == 0 or cursor is not None:
        page = await store.summaries(which, cursor=cursor, limit=10)
        cursor, looks = page.next_cursor, looks + 1
        assert page.rows == []
        assert cursor not in cursors
        cursors.add(cursor)
    longest = max(Counter(store.shard_of(f"r{number}") for number in range(25)).values())
    assert looks == -(-longest // 9), "25 rows, 9 of each shard at a time"
    for direction, expected in (("newest", ["r13", "r1"]), ("oldest", ["r1", "r13"])):
        rows = await pages(store, SummaryFilter(environment="rare"), limit=1, order=direction)
        assert [row.rollout_id for row in rows] == expected


# -- a model --------------------------------------------------------------------

Step = Callable[[Store, ManualClock], Awaitable[Any]]
ENVIRONMENTS, CODES, REWARDS = ["calc", "math"], ["engine_gone", "stage_timeout"], [0.0, 0.5, 1.0]


async def submit(store: Store, clock: ManualClock, name: str, environment: str) -> None:
    number = await store.last_event()
    await store.submit(order(f"{name}{number}", environment))


async def start(store: Store, clock: ManualClock, run: str, size: int) -> None:
    number = (await store.runs.get(run)).cursor
    members = [order(f"{run}.{number}.{sample}", ENVIRONMENTS[sample % 2]) for sample in range(size)]
    await store.runs.start_groups(run, [NewGroup(number, 0, members)])


def problem(code: str) -> ErrorInfo:
    return ENGINE_GONE.model_copy(update={"code": code})


async def work(store: Store, clock: ManualClock, how: str, code: str, reward: float) -> None:
    for lease in await store.claim("w", limit=2, lease_seconds=1e6):
        await store.advance(lease, "w", S.ROLLOUT)
        if how == "retry":
            await store.retry(lease, "w", problem(code))
        elif how == "fail":
            failed = result(lease, reward=None).model_copy(update={"error": problem(code)})
            await store.finish(lease, "w", failed)
        elif how == "complete":
            await store.finish(lease, "w", result(lease, reward=reward))


async def cancel(store: Store, clock: ManualClock, place: int) -> None:
    rollouts = (await store.list(limit=1_000)).rollouts
    if rollouts:
        await store.cancel(rollouts[place % len(rollouts)].rollout_id)


async def wait(store: Store, clock: ManualClock, seconds: float) -> None:
    clock.now += seconds


def steps() -> st.SearchStrategy[tuple[Callable[..., Awaitable[None]], tuple[Any, ...]]]:
    def step(call: Callable[..., Awaitable[None]], *drawn: st.SearchStrategy[Any]) -> Any:
        return st.tuples(st.just(call), st.tuples(*drawn))

    environments, codes = st.sampled_from(ENVIRONMENTS), st.sampled_from(CODES)
    hows = st.sampled_from(["retry", "fail", "complete", "complete", "hold"])
    return st.one_of(
        step(submit, st.sampled_from(["a", "a.1", "b"]), environments),
        step(start, st.sampled_from(["a", "z"]), st.integers(1, 4)),
        step(work, hows, codes, st.sampled_from(REWARDS)),
        step(cancel, st.integers(0, 30)),
        step(wait, st.sampled_from([-5.0, 1.0, 30.0])),
    )


def filters() -> st.SearchStrategy[SummaryFilter]:
    def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(st.none(), st.none(), values)

    times = st.integers(-10, 120).map(lambda seconds: START + timedelta(seconds=seconds))
    drawn = st.fixed_dictionaries(
        {
            "states": st.one_of(st.just([]), st.lists(st.sampled_from(list(S)), unique=True, max_size=3)),
            "run": maybe(st.sampled_from(["a", "z", "gone"])),
            "group": maybe(st.integers(0, 3)),
            "environment": maybe(st.sampled_from([*ENVIRONMENTS, "none"])),
            "error": maybe(st.sampled_from(CODES)),
            "reward_min": maybe(st.sampled_from(REWARDS)),
            "reward_max": maybe(st.sampled_from(REWARDS)),
            "since": maybe(times),
            "until": maybe(times),
            "text": maybe(st.sampled_from(["a", "a.", "a.1", "b", "a_"])),
        }
    )
    return drawn.map(lambda given: SummaryFilter(**given | ({} if given["run"] else {"group": None})))


def matches(which: SummaryFilter, row: RolloutSummary) -> bool:
    """Return whether a row is what a search asks for, said as plainly as can be."""
    return (
        (not which.states or row.state in which.states)
        and which.run in (None, row.run_id)
        and which.group in (None, row.group)
        and which.environment in (None, row.environment)
        and which.error in (None, row.error_code)
        and (which.reward_min is None or (row.reward is not None and row.reward >= which.reward_min))
        and (which.reward_max is None or (row.reward is not None and row.reward <= which.reward_max))
        and (which.since is None or row.created_at >= which.since)
        and (which.until is None or row.created_at < which.until)
        and row.rollout_id.startswith(which.text or "")
    )


async def check(store: Store, which: SummaryFilter, limit: int) -> None:
    """Compare a search with what all rollouts, one by one, are."""
    every = [found for one in (await store.list(limit=1_000)).rollouts if (found := await store.get(one.rollout_id))]
    rows = await pages(store, SummaryFilter(), limit=limit, order="oldest")
    assert [(row.rollout_id, row.state, row.attempt, row.reward, row.created_at) for row in rows] == [
        (one.rollout_id, one.state, one.attempt, one.reward, one.created_at) for one in every
    ]
    assert [row.turns for row in rows] == [one.usage.turns or None for one in every]
    expected = [row for row in rows if matches(which, row)]
    assert await pages(store, which, limit=limit, order="oldest") == expected
    assert await pages(store, which, limit=limit, order="newest") == expected[::-1]


async def play(store: Store, clock: ManualClock, calls: list[Any], searches: list[SummaryFilter]) -> None:
    for run in ("a", "z"):
        source = FileTasks(path="/x.jsonl", environment="calc", epochs=1)
        await create_run(store, run_id=run, source=source)
    for call, drawn in calls:
        clock.now += 1
        await call(store, clock, *drawn)
    await check_all(store, searches)


async def check_all(store: Store, searches: list[SummaryFilter]) -> None:
    for limit, which in enumerate(searches, start=1):
        await check(store, which, limit)


SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
CALLS, SEARCHES = st.lists(steps(), min_size=5, max_size=40), st.lists(filters(), min_size=3, max_size=8)


@settings(SETTINGS, max_examples=30)
@given(calls=CALLS, searches=SEARCHES)
def test_sqlite_lists_as_the_model_does(calls, searches):
    async def main() -> None:
        clock = ManualClock()
        async with await SqliteStore.open(":memory:", clock=clock) as store:
            await play(store, clock, calls, searches)

    anyio.run(main)


@pytest.mark.redis
@settings(SETTINGS, max_examples=20)
@given(calls=CALLS, searches=SEARCHES)
def test_redis_lists_as_the_model_does(shared_redis, calls, searches):
    async def main() -> None:
        clock = ManualClock()
        async with AsyncExitStack() as stack:
            opened = await RedisStore.open(shared_redis.config(), is_gone=is_gone, clock=clock)
            store = await stack.enter_async_context(opened)
            await play(store, clock, calls, searches)
            await store.collect_garbage()
            await check_all(store, searches)

    anyio.run(main)


# -- groups and history ---------------------------------------------------------


async def closed_group(
    store: Store, number: int, *, reason: str | None = None, mean: float = 0.5, **figures: Any
) -> None:
    """Start a group of the run `a`, end its two rollouts, and close it."""
    await store.runs.start_groups("a", [new_group(number)])
    for lease in await store.claim("w", limit=9, lease_seconds=1e6):
        await store.finish(lease, "w", result(lease, reward=mean))
    samples = [ClosedSample(s, f"a.{number}.{s}", True, None, mean, None) for s in range(2)]
    seconds = {"queued": 2.0, "engine": 5.0, "evaluate": 1.0}
    made = GroupFigures(**{"samples": 2, "turns": 6, "tokens": 140, "seconds": seconds} | figures)
    closure = GroupClosure(number, reason, samples, mean, 0.25, 3, 4, figures=made)
    await store.runs.close_group("a", closure)


async def test_the_history_says_how_a_run_went(store, clock):
    await create_run(store, batch_size=1)
    assert (await store.runs.history("a", points=10)).groups == []
    await store.runs.update("a", version=5)
    await closed_group(store, 0, mean=0.0, reason="zero_variance", failed=1)
    clock.now += 60
    await closed_group(store, 1, mean=1.0)
    clock.now += 60
    await store.runs.update("a", version=6)
    await closed_group(store, 2, mean=0.5)
    whole = await store.runs.history("a", points=10)
    assert whole.groups == [1, 1, 1]
    assert whole.at == [START + timedelta(seconds=seconds) for seconds in (0, 60, 120)]
    assert (whole.reward_mean, whole.reward_std) == ([0.0, 1.0, 0.5], [0.25] * 3)
    assert (whole.acceptance, whole.staleness) == ([0.0, 1.0, 1.0], [2.0, 2.0, 3.0])
    assert (whole.turns, whole.tokens, whole.failed) == ([3.0] * 3, [70.0] * 3, [0.5, 0.0, 0.0])
    assert whole.stage_shares == {
        "queued": [0.25] * 3,
        "init": [0.0] * 3,
        "engine": [0.625] * 3,
        "tool": [0.0] * 3,
        "rollout": [0.0] * 3,
        "evaluate": [0.125] * 3,
    }
    assert whole.dropped == {"zero_variance": [1, 0, 0]}
    halves = await store.runs.history("a", points=2)
    assert (halves.groups, halves.at) == ([1, 2], [whole.at[0], whole.at[2]])
    assert (halves.reward_mean, halves.staleness) == ([0.0, 0.75], [2.0, 2.5])
    assert halves.dropped == {"zero_variance": [1, 0]}


async def test_the_history_outlives_the_rollouts_but_not_the_run(store, clock):
    await create_run(store, batch_size=1)
    await closed_group(store, 0, reason="zero_variance", mean=0.0)
    await closed_group(store, 1, reason="too_few_usable", mean=0.75)
    before = await store.runs.history("a", points=10)
    (newest, oldest) = (await store.runs.group_page("a", GroupSelection())).groups
    assert [(one.rollout_id, one.reward, one.tokens) for one in newest.samples] == [
        ("a.1.0", 0.75, 70),
        ("a.1.1", 0.75, 70),
    ]
    clock.now += 100
    assert await store.runs.delete_expired(RetentionSettings(settled_group_seconds=50)) > 0
    assert await store.runs.history("a", points=10) == before
    emptied = (await store.runs.group_page("a", GroupSelection())).groups
    bare = {"samples": [], "environment": ""}
    assert emptied == [newest.model_copy(update=bare), oldest.model_copy(update=bare)]
    await store.runs.update("a", state=RunState.ENDED)
    clock.now += 100
    while await store.runs.delete_expired(RetentionSettings(ended_run_seconds=50)):
        pass
    with pytest.raises(NotFoundError):
        await store.runs.history("a", points=10)
    await create_run(store, batch_size=1)
    assert (await store.runs.history("a", points=10)).groups == []


async def test_a_surplus_group_passed_the_filters_and_was_dropped(store):
    await create_run(store, batch_size=1, surplus="cancel")
    await closed_group(store, 0)
    await closed_group(store, 1)
    await store.runs.lease(BatchLeaseRequest("a", "k", 60.0))
    history = await store.runs.history("a", points=1)
    assert (history.acceptance, history.dropped) == ([1.0], {"surplus": [1]})
    (row,) = (await store.runs.group_page("a", GroupSelection("dropped", "surplus"))).groups
    assert (row.number, row.state, row.reason, row.batch) == (1, "dropped", "surplus", None)
    (row,) = (await store.runs.group_page("a", GroupSelection("batched"))).groups
    assert (row.number, row.batch, row.reason) == (0, 0, None)


async def test_an_open_group_shows_how_far_its_samples_are(store):
    await create_run(store)
    await store.runs.start_groups("a", [new_group(0)])
    await store.cancel("a.0.1")
    (row,) = (await store.runs.group_page("a", GroupSelection())).groups
    assert (row.state, row.environment, row.closed_at) == ("open", "calc", None)
    assert [(one.sample, one.state, one.reward) for one in row.samples] == [
        (0, S.QUEUED, None),
        (1, S.CANCELLED, None),
    ]


@pytest.mark.parametrize("cursor", ["n", "5", "o1", "n1;"])
async def test_a_wrong_cursor_of_groups_is_refused(store, cursor):
    await create_run(store)
    with pytest.raises(InvalidFieldError):
        await store.runs.group_page("a", GroupSelection(), cursor=cursor)


async def test_a_run_that_is_unknown_has_no_history(store):
    with pytest.raises(NotFoundError):
        await store.runs.history("b", points=3)
    with pytest.raises(NotFoundError):
        await store.runs.group_page("b", GroupSelection())

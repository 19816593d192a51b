"""The rules of runs, groups and batches agree with models that are written another way."""

import ast
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

import rollout_service
from api_schemas.runs import InlineTasks, RunRequest, RunState, Surplus
from api_schemas.runs.live import LiveDelivery
from api_schemas.tasks import Task
from rollout_service.groups import shares
from rollout_service.groups.shares import Owner
from rollout_service.store import rules
from rollout_service.store.codec.runs import decode_samples, encode_samples
from rollout_service.store.rules import NewBatch, SettledGroup
from rollout_service.store.runs_contract import ClosedSample, NoBatch, ReadyGroup, RunRecord

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TASK = Task(environment="calc", instance={})
counts = st.integers(0, 6)


def run_of(
    state: RunState = RunState.RUNNING,
    *,
    version: int = 0,
    total: int | None = 8,
    cursor: int = 0,
    **asked: Any,
) -> RunRecord:
    counters = asked.pop("counters", {})
    source = asked.pop("source", InlineTasks(tasks=[TASK]))
    request = RunRequest(run_id="r", source=source, group_size=2, **{"batch_size": 2} | asked)
    return RunRecord(
        run_id="r",
        request=request,
        state=state,
        version=version,
        first_version=0,
        tasks=8,
        total=total,
        digest=None,
        cursor=cursor,
        counters=counters,
        problem=None,
        created_at=NOW,
        changed_at=NOW,
    )


runs = st.builds(
    lambda state, cursor, total, size, surplus, counters: run_of(
        state, cursor=cursor, total=total, batch_size=size, surplus=surplus, counters=counters
    ),
    st.sampled_from(RunState),
    counts,
    st.none() | counts,
    st.integers(1, 4),
    st.sampled_from(Surplus),
    st.fixed_dictionaries({"open": counts, "batched": counts}),
)
ready_groups = st.lists(st.none() | st.integers(0, 9), max_size=8).map(
    lambda versions: [ReadyGroup(number, version) for number, version in enumerate(versions)]
)


@given(runs, ready_groups, st.none() | st.integers(0, 9))
@example(run_of(batch_size=2), [ReadyGroup(0, None)], None)
def test_a_new_batch_is_full_or_the_last_and_never_stale(run, ready, bound):
    decision = rules.next_batch(run, ready, bound=bound, due_in=7.0)
    no_more = (run.total is not None and run.cursor >= run.total) or run.state in rules.OVER
    if isinstance(decision, NewBatch):
        assert 1 <= len(decision.groups) <= run.request.batch_size
        assert len(decision.groups) == run.request.batch_size or (no_more and not run.count("open"))
        numbers = [group.number for group in ready]
        taken = len(decision.groups)
        assert list(decision.groups) == numbers[:taken], "the oldest groups come first"
        assert not any(rules.is_stale(group.oldest_version, bound) for group in ready)
        cancels = run.request.surplus is Surplus.CANCEL
        assert list(decision.surplus) == (numbers[taken:] if cancels else [])
        assert decision.cancels_open == cancels
    else:
        stale = bound is not None and any(
            group.oldest_version is not None and group.oldest_version < bound for group in ready
        )
        assert decision.stale == stale
        assert stale or decision.due_in == 7.0


def test_samples_of_earlier_releases_are_read():
    """They have no owner, and those without one are written as before."""
    text = '[{"sample":0,"rollout_id":"a.0.0","usable":true,"masked_because":null,"reward":1.0,"advantage":null}]'
    (sample,) = decode_samples(text)
    assert sample == ClosedSample(0, "a.0.0", True, None, 1.0, None)
    assert encode_samples([sample]) == text
    owned = replace(sample, owner=Owner("s", "u", "t"))
    assert decode_samples(encode_samples([sample, owned])) == [sample, owned]


def owned(number: int, tenant: str) -> ReadyGroup:
    return ReadyGroup(number, None, [Owner(f"s{number}", f"u{number}", tenant)])


def test_a_batch_of_live_sessions_mixes_no_tenants():
    open_source = InlineTasks(open=True)
    ready = [owned(0, "a"), owned(1, "b"), owned(2, "b"), owned(3, "a")]
    run = run_of(total=None, source=open_source, live=LiveDelivery(max_user_share=1, max_session_share=1))
    assert rules.next_batch(run, ready, bound=None) == NewBatch([0, 3])
    assert rules.next_batch(run, ready[1:], bound=None) == NewBatch([1, 2])
    assert isinstance(rules.next_batch(run, ready[:2], bound=None), NoBatch)
    ended = replace(run, state=RunState.ENDED)
    assert rules.next_batch(ended, ready[:2], bound=None) == NewBatch([0])
    kept = run_of(total=None, source=open_source, live=LiveDelivery(mix_tenants=True, max_user_share=1))
    assert rules.next_batch(kept, ready, bound=None) == NewBatch([0, 1])


def test_groups_of_earlier_releases_are_in_no_batch_with_others():
    run = run_of(total=None, source=InlineTasks(open=True), live=LiveDelivery())
    ready = [ReadyGroup(0, None), owned(1, "a"), owned(2, "a"), ReadyGroup(3, None)]
    assert rules.next_batch(run, ready, bound=None) == NewBatch([0, 3])
    assert rules.next_batch(run, ready[:3], bound=None) == NewBatch([1, 2])


def test_groups_that_wait_are_looked_at_a_few_times_each_however_many_they_are():
    reads = Counter[int]()

    @dataclass
    class Waiting:
        number: int

        @property
        def owners(self) -> list[Owner]:
            reads[self.number] += 1
            return [Owner(f"s{self.number}", f"u{self.number}", "abc"[self.number % 3])]

    left = shares.left_over([Waiting(number) for number in range(1_000)], 8, LiveDelivery())
    assert sorted(group.number for group in left) == list(range(984, 1_000))
    assert max(reads.values()) < 10


@given(runs, ready_groups)
def test_a_run_has_no_further_batch_only_when_nothing_can_become_one(run, ready):
    decision = rules.next_batch(run, ready, bound=None)
    if isinstance(decision, NoBatch) and decision.over and run.state is not RunState.FINISHED:
        assert not ready
        assert not run.count("open")
        assert not run.count("batched")
        assert run.exhausted


@given(st.integers(0, 9), st.none() | st.integers(0, 9), st.none() | st.integers(0, 9))
def test_a_group_is_stale_when_it_lags_by_more_than_the_run_allows(version, max_staleness, oldest):
    bound = rules.oldest_allowed(run_of(version=version, max_staleness=max_staleness))
    lags = None if oldest is None else version - oldest
    assert rules.is_stale(oldest, bound) == (max_staleness is not None and lags is not None and lags > max_staleness)


names = st.sampled_from(["dropped:stale", "dropped:too_long", "ready", "masked"])


@given(st.dictionaries(names, counts), st.dictionaries(names, counts))
def test_the_counts_of_dropped_groups_add_up(first, added):
    second = {name: first.get(name, 0) + added.get(name, 0) for name in first.keys() | added.keys()}
    before, after = rules.dropped_counts(first), rules.dropped_counts(second)
    reported = rules.added_counts(before, after)
    assert {name: before.get(name, 0) + reported.get(name, 0) for name in after} == after
    assert all(reported.values())
    assert not reported.keys() - {"stale", "too_long"}


def closed(sample: int, masked: str | None) -> ClosedSample:
    return ClosedSample(sample, f"r.0.{sample}", masked is None, masked, None, None)


masks = st.lists(st.sampled_from([None, "stale", "tool_failed"]), min_size=1, max_size=5)


@given(st.data(), masks)
def test_closing_a_group_again_counts_only_what_is_newly_masked(data, before):
    after = [mask or data.draw(st.sampled_from([None, "stale"])) for mask in before]
    first, second = ([closed(n, mask) for n, mask in enumerate(masks)] for masks in (before, after))
    added = [rules.masked_counts(first), rules.masked_counts(second, first)]
    total = {name: sum(counts.get(name, 0) for counts in added) for name in ("masked", "masked:stale")}
    assert total == {
        "masked": sum(mask is not None for mask in after),
        "masked:stale": sum(mask == "stale" for mask in after),
    }
    assert rules.delivered_rollouts(second) == [f"r.0.{n}" for n, mask in enumerate(after) if mask != "stale"]


@given(runs, counts)
def test_a_run_is_finished_when_all_its_tasks_were_taken_and_delivered(run, ready):
    run = replace(run, counters={**run.counters, "ready": ready})
    alive = run.state in (RunState.RUNNING, RunState.PAUSED)
    taken = run.total is not None and run.cursor >= run.total
    settled = run.count("open") == run.count("ready") == run.count("batched") == 0
    assert rules.is_finished(run) == (alive and taken and settled)


def test_total_tasks_counts_the_epochs():
    assert rules.total_tasks(InlineTasks(tasks=[TASK], epochs=3), 5) == 15
    assert rules.total_tasks(InlineTasks(tasks=[TASK], epochs=None), 5) is None
    assert rules.total_tasks(InlineTasks(tasks=[TASK], open=True), 5) is None


settled_groups = st.lists(st.tuples(counts, st.integers(0, 20)), max_size=8).map(
    lambda rows: [
        SettledGroup(number, size, at) for number, (size, at) in enumerate(sorted(rows, key=lambda row: -row[1]))
    ]
)


@given(settled_groups, st.none() | st.integers(0, 20), st.none() | st.integers(0, 30))
def test_pruning_keeps_the_newest_groups_within_both_limits(settled, seconds, max_bytes):
    pruned = rules.groups_to_prune(settled, seconds=seconds, max_bytes=max_bytes, now=20)
    kept = [group for group in settled if group.number not in pruned]
    assert kept == settled[: len(kept)], "the oldest go first"
    assert max_bytes is None or sum(group.bytes for group in kept) <= max_bytes
    assert seconds is None or all(group.settled_at > 20 - seconds for group in kept)
    if pruned:
        next_one = settled[len(kept)]
        size = sum(group.bytes for group in kept) + next_one.bytes
        aged = seconds is not None and next_one.settled_at <= 20 - seconds
        assert aged or (max_bytes is not None and size > max_bytes), "nothing is pruned needlessly"


def test_no_module_of_runs_or_rules_imports_a_store():
    """Another store can reuse the rules, the codecs and the run manager as they are."""
    root = Path(rollout_service.__file__).parent
    shared = [*root.glob("runs/*.py"), *root.glob("groups/*.py"), *root.glob("store/*.py")]
    shared += root.glob("store/codec/*.py")
    for path in shared:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any("sqlite" in name for name in names), path

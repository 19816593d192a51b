"""The metrics of live sessions add up, name what is wrong, and hold nothing that was said."""

from collections.abc import Mapping, Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from api_schemas.rollouts.sessions import MaskReason
from api_schemas.sessions import FeedbackByVersion
from rollout_service.base.errors import StoreError
from rollout_service.live import metrics as module
from rollout_service.live.contract import UnjudgedTurn
from rollout_service.live.metrics import LiveFunnel, LiveMetrics
from tests.support.live.store import a_state, a_turn, explicit, judged

SAID = "the user's own words"


class Figures:
    """The part of a store that the metrics read."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self.kept = dict(counts or {})
        self.versions: list[FeedbackByVersion] = []
        self.waiting: list[UnjudgedTurn] = []
        self.problem: BaseException | None = None

    async def counts(self, session_id: str | None = None) -> Mapping[str, int]:
        if self.problem is not None:
            raise self.problem
        return dict(self.kept)

    async def feedback(self) -> Sequence[FeedbackByVersion]:
        return self.versions

    async def to_judge(self, limit: int) -> Sequence[UnjudgedTurn]:
        return self.waiting[:limit]


def funnel(store: Figures, registry: CollectorRegistry, now: float = 100.0) -> LiveFunnel:
    made = LiveFunnel(store, open_sessions=lambda: 7, judge_queue=lambda: 2, clock=lambda: now)  # type: ignore[arg-type]
    registry.register(made)
    return made


def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Return all values by name and labels."""
    return {(one.name, *one.labels.values()): one.value for family in registry.collect() for one in family.samples}


counts_of_turns = st.fixed_dictionaries(
    {name: st.integers(0, 10**6) for name in ("delivered", "waiting", *(f"dropped:{one}" for one in MaskReason))}
)


@given(counts_of_turns)
def test_what_became_of_turns_adds_up_to_those_served(counts):
    registry = CollectorRegistry()
    served = sum(counts.values())
    made = funnel(Figures({**counts, "served": served, "recorded": served, "judged": 1}), registry)
    anyio.run(made.refresh)
    read = samples(registry)
    states = sum(value for key, value in read.items() if key[0] == "rollout_live_turns")
    assert states == read["rollout_live_served_total",] == served
    assert read["rollout_live_turns", "dropped", "side"] == counts["dropped:side"]


@pytest.mark.parametrize("problem", [StoreError("the disk is full"), TimeoutError()])
async def test_a_failing_store_leaves_the_last_figures(problem):
    registry = CollectorRegistry()
    store = Figures({"served": 3, "waiting": 3})
    made = funnel(store, registry)
    await made.refresh()
    store.problem, store.kept = problem, {}
    await made.refresh()
    assert samples(registry)["rollout_live_served_total",] == 3


async def test_a_hung_store_holds_up_no_scrape(monkeypatch):
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.05)
    store = Figures()

    async def hang(session_id: str | None = None) -> Mapping[str, int]:
        await anyio.sleep_forever()
        raise AssertionError

    store.counts = hang  # type: ignore[method-assign]
    with anyio.fail_after(5):
        await funnel(store, CollectorRegistry()).refresh()


async def test_the_age_of_the_longest_waiting_turn_grows_between_scrapes():
    registry = CollectorRegistry()
    store = Figures()
    made = funnel(store, registry, now=100.0)
    await made.refresh()
    assert samples(registry)["rollout_live_judge_age_seconds",] == 0
    store.waiting = [UnjudgedTurn("s", 0, 40.0)]
    await made.refresh()
    read = samples(registry)
    assert read["rollout_live_judge_age_seconds",] == 60
    assert (read["rollout_live_sessions",], read["rollout_live_judge_queue",]) == (7, 2)


async def test_only_the_newest_versions_of_each_pool_have_series():
    registry = CollectorRegistry()
    store = Figures()
    store.versions = [
        FeedbackByVersion(pool=pool, version=version, turns=4, value_mean=0.5, satisfied=0.75)
        for pool in ("policy", "next")
        for version in range(30)
    ]
    await funnel(store, registry).refresh()
    shown = [key[1:] for key in samples(registry) if key[0] == "rollout_live_satisfied_share"]
    assert sorted(shown) == sorted((pool, str(v)) for pool in ("policy", "next") for v in range(22, 30))


def test_values_are_counted_by_source_and_sign_and_timed():
    registry = CollectorRegistry()
    metrics = LiveMetrics(registry)
    followed = a_turn(answer=SAID, next_state=a_state(SAID, at=4.0))
    for value in (1.0, -1.0, 0.0, None):
        metrics.judged(followed, judged(value, at=10.0))
    metrics.judged(followed, judged(-1.0, source="override:tool_error", at=10.0))
    metrics.judged(a_turn(), explicit(0.5))
    assert SAID.encode() not in generate_latest(registry)
    read = samples(registry)
    for sign in ("plus", "minus", "zero", "none"):
        assert read["rollout_live_values_total", "judge", sign] == 1
    assert read["rollout_live_values_total", "override", "minus"] == 1
    assert read["rollout_live_values_total", "explicit", "plus"] == 1
    assert read["rollout_live_judge_seconds_count",] == 5
    assert read["rollout_live_judge_seconds_sum",] == 5 * 6.0


def test_agreement_waiting_redactions_and_unrecorded_requests_are_counted():
    registry = CollectorRegistry()
    metrics = LiveMetrics(registry)
    for judge, user in ((1.0, 0.2), (0.0, 0.0), (-1.0, 1.0)):
        metrics.compared(judged=judge, explicit=user)
    metrics.handed_over(12.0)
    metrics.held("policy", 3.0, refused=False)
    metrics.held("policy", 30.0, refused=True)
    metrics.redacted({"aws_key": 2, "email": 1})
    metrics.unrecorded("no-session")
    read = samples(registry)
    assert [read["rollout_live_compared_total", agree] for agree in ("yes", "no")] == [2, 1]
    assert read["rollout_live_part_seconds_sum",] == 12
    assert read["rollout_live_held_seconds_sum", "policy", "served"] == 3
    assert read["rollout_live_held_seconds_count", "policy", "refused"] == 1
    assert read["rollout_live_redactions_total", "aws_key"] == 2
    assert read["rollout_live_unrecorded_total", "no-session"] == 1

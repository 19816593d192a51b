"""Groups are planned and closed in the same way each time, whatever the clocks of hosts say."""

import struct
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts import Rollout, RolloutState, Usage
from api_schemas.runs import RunRequest
from api_schemas.tasks import Task
from rollout_service.groups.auxiliary import NO_PARTS, reward_weights
from rollout_service.groups.filters import FilterChain
from rollout_service.runs import Delivery
from rollout_service.runs.open_groups import close_group
from rollout_service.runs.planning import sample_seed
from rollout_service.store.runs_contract import (
    BatchLease,
    BatchLeaseRequest,
    GroupClosure,
    GroupMember,
    NoBatch,
    RunStore,
)
from tests.support import samples
from tests.support.run_bench import bench, place

AUXILIARY = {"lambda1": {"init": 0.3}, "lambda2": {"init": 0.2}, "length": 10}
PARTS = {"perf": 1.0, "parallel": 0.5, "width": 0.25, "finish": 1.0}
OVERLONG = {"max_tokens": 100, "buffer_tokens": 100, "penalty": 0.5}
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
SHARE = st.floats(0, 1)


def sample(
    number: int, perf: float | None, parts: dict[str, float] | None = None, tokens: int = 0, version: int = 0
) -> tuple[GroupMember, Rollout]:
    """Return a sample whose rollout completed, or was cancelled if it has no reward."""
    state = RolloutState.CANCELLED if perf is None else RolloutState.COMPLETED
    rollout_id = f"a.0.{number}"
    fields = {"reward": perf, "reward_parts": parts or {}, "usage": Usage(sampled_tokens=tokens)}
    rollout = samples.rollout(rollout_id, state, task=Task(environment="pointers"), **fields)
    member = GroupMember(
        sample=number,
        rollout_id=rollout_id,
        state=state,
        reward=perf,
        rolling_seconds=None,
        oldest_version=version,
        newest_version=version,
        is_straggler=False,
    )
    return member, rollout


def handed_on(number: int, perf: float, parallel: float, finish: float, width: float = 0.0, **fields: int):
    parts = {"perf": perf, "parallel": parallel, "width": width, "finish": finish}
    return sample(number, perf, parts, **fields)


def close(samples, *, version: int = 0, **fields: object) -> GroupClosure:
    given = {"source": {"kind": "inline", "open": True}, "batch_size": 1, "filters": []} | fields
    request = RunRequest.model_validate(given)
    return close_group(request, FilterChain(()), 0, samples, weights=reward_weights(request, version))


def rewards(closure: GroupClosure) -> list[float | None]:
    return [one.reward for one in closure.samples]


def test_the_reward_is_the_weighted_total_of_the_version_at_which_the_group_closes():
    samples = [handed_on(0, 1.0, 0.5, 1.0), handed_on(1, 0.0, 1.0, 0.5), sample(2, None)]
    closure = close(samples, auxiliary=AUXILIARY)
    assert rewards(closure) == [pytest.approx(1.35), pytest.approx(0.4), None]
    assert closure.reward_weights.model_dump() == {
        "perf": 1.0,
        "parallel": 0.3,
        "finish": 0.2,
        "at_version": 0,
    }
    assert rewards(close(samples, auxiliary=AUXILIARY, version=5)) == [
        pytest.approx(1.175),
        pytest.approx(0.2),
        None,
    ]
    assert rewards(close(samples, auxiliary=AUXILIARY, version=10)) == [1.0, 0.0, None]


def test_the_measure_is_the_run_s():
    samples = [handed_on(0, 0.0, 0.5, 0.0, width=1.0), handed_on(1, 1.0, 0.5, 0.0, width=0.0)]
    assert rewards(close(samples, auxiliary=AUXILIARY)) == [0.15, 1.15]
    assert rewards(close(samples, auxiliary=AUXILIARY | {"parallel": "width"})) == [0.3, 1.0]


def test_mean_and_deviation_are_those_of_the_outcome_and_say_so():
    samples = [handed_on(0, 1.0, 0.5, 1.0), handed_on(1, 0.0, 1.0, 0.5)]
    closure = close(samples, auxiliary=AUXILIARY, overlong=OVERLONG)
    assert (closure.reward_mean, closure.reward_std, closure.measured_on) == (0.5, 0.5, "perf")
    plain = close(samples, overlong=OVERLONG)
    assert (plain.reward_mean, plain.reward_std, plain.measured_on) == (0.5, 0.5, None)
    assert (plain.filtered_on, plain.reward_weights) == ([], None)


def test_a_sample_without_the_parts_is_masked_and_not_taken_for_a_zero():
    samples = [handed_on(0, 1.0, 0.5, 1.0), sample(1, 1.0), sample(2, 0.0, {"parallel": 0.5})]
    closure = close(samples, auxiliary=AUXILIARY, advantages="leave_one_out")
    assert [one.masked_because for one in closure.samples] == [None, NO_PARTS, NO_PARTS]
    assert rewards(closure)[1:] == [None, None]
    assert [one.advantage for one in closure.samples] == [None, None, None]
    assert rewards(close(samples)) == [1.0, 1.0, 0.0], "without an auxiliary reward they count"


def test_penalties_come_on_top():
    samples = [handed_on(0, 1.0, 0.5, 1.0, tokens=100), handed_on(1, 0.0, 1.0, 0.5)]
    assert rewards(close(samples, auxiliary=AUXILIARY, overlong=OVERLONG)) == [
        pytest.approx(0.85),
        pytest.approx(0.4),
    ]


@given(st.lists(st.tuples(FINITE, SHARE, SHARE), min_size=1, max_size=8), st.integers(10, 1_000))
def test_at_weights_of_zero_all_is_bit_for_bit_as_without_them(parts, version):
    samples = [handed_on(number, *one) for number, one in enumerate(parts)]
    for advantages in ("none", "group_norm", "leave_one_out"):
        ended = close(samples, version=version, auxiliary=AUXILIARY, advantages=advantages)
        plain = close(samples, advantages=advantages)
        assert list(map(bits, ended.samples)) == list(map(bits, plain.samples))
    by_part = close(samples, version=version, auxiliary=AUXILIARY, advantages="parts_norm")
    normed = close(samples, advantages="group_norm")
    assert [one.advantage for one in by_part.samples] == [one.advantage for one in normed.samples]


def bits(one) -> list[bytes | None]:
    values = (one.reward, one.advantage)
    return [None if value is None else struct.pack("<d", value) for value in values]


def test_advantages_by_part_weigh_each_part_alone():
    samples = [handed_on(0, 1.0, 0.0, 0.5), handed_on(1, 0.0, 1.0, 0.5), sample(2, None)]
    closure = close(samples, auxiliary=AUXILIARY, advantages="parts_norm")
    assert [one.advantage for one in closure.samples] == [pytest.approx(0.7), pytest.approx(-0.7), None]
    overlong = close(
        [handed_on(0, 1.0, 0.0, 0.5, tokens=100), handed_on(1, 0.5, 1.0, 0.5)],
        auxiliary=AUXILIARY,
        advantages="parts_norm",
        overlong=OVERLONG,
    )
    assert [one.advantage for one in overlong.samples] == [pytest.approx(-0.3), pytest.approx(0.3)]


def test_advantages_by_part_need_parts():
    with pytest.raises(ValueError, match="parts_norm need an auxiliary reward"):
        close([handed_on(0, 1.0, 0.5, 1.0)], advantages="parts_norm")


HELD_SECONDS = 0.5


@pytest.fixture(params=[30.0, -30.0], ids=["store ahead", "store behind"])
def clock(request: pytest.FixtureRequest) -> Callable[[], float]:
    """Return the clock of a store whose host is half a minute ahead of this one, or behind it."""
    return lambda: time.time() + request.param


class CountedLeases:
    """The runs of a store, and how often a batch was asked for."""

    def __init__(self, runs: RunStore) -> None:
        self._runs = runs
        self.asked = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runs, name)

    async def lease(self, order: BatchLeaseRequest) -> BatchLease | NoBatch:
        self.asked += 1
        return await self._runs.lease(order)


async def test_a_batch_is_delivered_again_as_soon_as_its_lease_ends(clock):
    async with bench(lambda lease: float(place(lease)[1] % 2), clock=clock) as it:
        await it.create(tasks=2)
        counted = CountedLeases(it.store.runs)
        delivery = Delivery(counted, lambda _: it.manager)  # type: ignore[arg-type]
        order = BatchLeaseRequest("a", "first", HELD_SECONDS)
        assert await delivery.lease(order, version=None, timeout=10) is not None
        counted.asked, began = 0, time.monotonic()
        again = await delivery.lease(BatchLeaseRequest("a", "second", 60), version=None, timeout=20)
        assert again.delivery == 2
        assert HELD_SECONDS - 0.1 < time.monotonic() - began < 10
        assert counted.asked <= 5, "nothing polls"


EPOCHS = {number: [sample_seed(7, number, sample) for sample in range(8)] for number in range(100)}


def test_no_two_samples_of_a_run_share_a_seed_and_the_same_run_has_the_same_ones():
    seeds = [seed for group in EPOCHS.values() for seed in group]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds), "engines may keep seeds in 32 bits"
    assert seeds[:2] == [1_664_739_778, 1_664_739_779], "in every release"


@pytest.mark.parametrize("seed", [-(2**62), 0, 2**62])
def test_the_largest_group_has_distinct_seeds(seed):
    assert len({sample_seed(seed, 2**40, sample) for sample in range(1_024)}) == 1_024


def test_a_run_with_the_next_seed_repeats_no_sample():
    other = {sample_seed(8, number, sample) for number in range(100) for sample in range(8)}
    assert other.isdisjoint(seed for group in EPOCHS.values() for seed in group)

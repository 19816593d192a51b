"""A host whose clock differs from the store's delivers batches in time, and does not ask for them again and again."""

import time
from collections.abc import Callable

import pytest

from rollout_service.runs import Delivery
from rollout_service.store.runs_contract import BatchLease, BatchLeaseRequest, NoBatch, RunStore
from tests.support.run_bench import bench, place

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
        delivery = Delivery(counted, it.manager)  # type: ignore[arg-type]
        order = BatchLeaseRequest("a", "first", HELD_SECONDS)
        assert await delivery.lease(order, version=None, timeout=10) is not None
        counted.asked, began = 0, time.monotonic()
        again = await delivery.lease(BatchLeaseRequest("a", "second", 60), version=None, timeout=20)
        assert again is not None
        assert again.delivery == 2
        assert HELD_SECONDS - 0.1 < time.monotonic() - began < 10
        assert counted.asked <= 5, "nothing polls"

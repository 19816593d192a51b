"""Slots of sub-agents: never more than there are, fair over episodes, and none lost to whoever gives up."""

from collections import Counter

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.pipeline.fair_slots import FairSlots


async def test_an_episode_that_waits_for_many_gets_no_more_than_one_that_waits_for_few():
    slots, order = FairSlots(1), []

    async def work(episode):
        async with slots.slot(episode):
            order.append(episode)
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        for episode in ["wide"] * 6 + ["narrow"] * 2:
            tasks.start_soon(work, episode)
    assert order[:5] == ["wide", "wide", "narrow", "wide", "narrow"]
    assert (slots.held, slots.waiting) == (0, 0)


@pytest.mark.slow
async def test_512_episodes_with_8_tasks_each_share_32_slots_without_starvation():
    slots, clock = FairSlots(32), Counter()
    waited = Counter()

    async def work(episode):
        since = clock["now"]
        async with slots.slot(episode):
            waited[episode] += clock["now"] - since
            clock["now"] += 1
            await checkpoint()

    async def hold(until):
        async with slots.slot("earlier"):
            await until.wait()

    async with anyio.create_task_group() as tasks:
        queued = anyio.Event()
        for _ in range(32):
            tasks.start_soon(hold, queued)
        for number in range(512):
            for _ in range(8):
                tasks.start_soon(work, f"episode {number}")
        while slots.waiting < 512 * 8:
            await checkpoint()
        queued.set()
    waits = [waited[f"episode {number}"] for number in range(512)]
    assert max(waits) < 3 * min(waits)


async def test_a_slot_that_is_lent_lets_others_work_and_comes_back():
    slots, events = FairSlots(1), []

    async def child():
        async with slots.slot("e"):
            events.append("child")

    async with slots.slot("e") as held:
        async with held.lent(), anyio.create_task_group() as tasks:
            tasks.start_soon(child)
        events.append("parent")
        assert slots.held == 1
    assert events == ["child", "parent"]
    assert slots.held == 0


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=30), st.integers(1, 4)
)
def test_no_slot_is_lost_whoever_gives_up(workers, total):
    async def main():
        slots, most = FairSlots(total), 0

        async def work(episode, patience, lends):
            nonlocal most
            scope = anyio.CancelScope()

            async def impatient():
                for _ in range(patience):
                    await checkpoint()
                scope.cancel()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(impatient)
                with scope:
                    async with slots.slot(f"episode {episode}") as held:
                        most = max(most, slots.held)
                        await checkpoint()
                        if lends:
                            async with held.lent():
                                await checkpoint()
                        await checkpoint()

        async with anyio.create_task_group() as tasks:
            for worker in workers:
                tasks.start_soon(work, *worker)
        assert (slots.held, slots.waiting) == (0, 0)
        assert most <= total

    anyio.run(main)

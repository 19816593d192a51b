"""A change wakes everyone who is waiting for it, and nobody who comes later."""

import anyio

from rollout_service.base.signals import BatchQueue, ChangeSignal


async def test_a_change_wakes_everyone_who_waits():
    signal, woken = ChangeSignal(), []

    async def wait(number):
        await signal.wait()
        woken.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(wait, number)
        await anyio.wait_all_tasks_blocked()
        assert woken == []
        signal.notify()
    assert sorted(woken) == [0, 1, 2]


async def test_no_change_is_missed_by_whoever_took_the_event_before_looking():
    signal = ChangeSignal()
    event = signal.next
    signal.notify()
    assert event.is_set()
    assert signal.next is not event


async def test_a_queue_gives_batches_in_order_and_drops_what_is_too_much():
    queue = BatchQueue[int](most=5, at_once=2, collect_seconds=0.0)
    assert [queue.put(number) for number in range(7)] == [True] * 5 + [False] * 2
    assert [await queue.next_batch() for _ in range(3)] == [[0, 1], [2, 3], [4]]


async def test_what_is_discarded_is_in_no_batch():
    queue = BatchQueue[int](most=5, at_once=5, collect_seconds=0.0)
    queue.put(1)
    queue.discard(lambda _: True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(queue.next_batch)
        with anyio.fail_after(10):
            await queue.until_done()
        tasks.cancel_scope.cancel()
    for number in range(3):
        queue.put(number)
    queue.discard(lambda number: number == 1)
    assert await queue.next_batch() == [0, 2]


async def test_a_queue_collects_no_longer_once_somebody_waits_for_it():
    queue = BatchQueue[int](most=5, at_once=5, collect_seconds=600.0)
    async with anyio.create_task_group() as tasks:
        batches: list[list[int]] = []

        async def work() -> None:
            while True:
                batches.append(await queue.next_batch())

        tasks.start_soon(work)
        await anyio.wait_all_tasks_blocked()
        for number in range(2):
            queue.put(number)
            with anyio.fail_after(10):
                await queue.until_done()
        tasks.cancel_scope.cancel()
    assert batches == [[0], [1]]


async def test_a_queue_is_done_once_the_worker_asks_for_more():
    queue, done = BatchQueue[int](most=5, at_once=5, collect_seconds=0.0), []
    await queue.until_done()
    queue.put(1)

    async def wait():
        await queue.until_done()
        done.append(True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        assert await queue.next_batch() == [1]
        await anyio.wait_all_tasks_blocked()
        assert not done
        tasks.start_soon(queue.next_batch)
        await anyio.wait_all_tasks_blocked()
        assert done
        queue.put(2)

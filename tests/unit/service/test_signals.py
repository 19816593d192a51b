"""A change wakes everyone who is waiting for it, and nobody who comes later."""

import anyio
import pytest

from rollout_service.signals import ChangeSignal

pytestmark = pytest.mark.anyio


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


async def test_a_change_before_the_wait_does_not_count():
    signal = ChangeSignal()
    signal.notify()
    with anyio.move_on_after(0.01) as limit:
        await signal.wait()
    assert limit.cancelled_caught


async def test_no_change_is_missed_by_whoever_took_the_event_before_looking():
    signal = ChangeSignal()
    event = signal.next
    signal.notify()
    assert event.is_set()
    assert signal.next is not event

"""Stacks of suspended tasks lead down to what is waited for, through every kind of awaitable, and hold no values."""

import asyncio
import sys
import threading
import time
import types
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio

from rollout_service.server.hangs.stacks import MAX_FRAMES, culprit, stack_of_task, stack_of_thread


async def stack_in(wait: Callable[[anyio.Event], Any]) -> list[str]:
    """Return the functions of the stack of a task that waits for an event like this."""
    event, found = anyio.Event(), asyncio.get_running_loop().create_future()

    async def outermost() -> None:
        found.set_result(asyncio.current_task())
        await wait(event)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outermost)
        task = await found
        await anyio.lowlevel.checkpoint()
        frames = stack_of_task(task)
        event.set()
    return [frame.function.rpartition(".")[2] for frame in frames]


@asynccontextmanager
async def entered(event: anyio.Event) -> AsyncIterator[None]:
    await event.wait()
    yield


async def numbers(event: anyio.Event) -> AsyncIterator[int]:
    await event.wait()
    yield 1


@types.coroutine
def old_style(event: anyio.Event) -> Any:
    return (yield from event.wait().__await__())


class Awaitable:
    def __init__(self, event: anyio.Event) -> None:
        self.event = event

    def __await__(self) -> Any:
        return self.event.wait().__await__()


async def in_context(event: anyio.Event) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(entered(event))


async def iterating(event: anyio.Event) -> None:
    async for _ in numbers(event):
        pass


async def generator(event: anyio.Event) -> None:
    await old_style(event)


async def awaiting(event: anyio.Event) -> None:
    await Awaitable(event)


async def test_coroutines_context_managers_and_generators():
    for wait, inner in (
        (in_context, "entered"),
        (iterating, "numbers"),
        (generator, "old_style"),
        (awaiting, "awaiting"),
    ):
        stack = await stack_in(wait)
        assert stack.index("outermost") < stack.index(inner) < stack.index("wait"), (inner, stack)


async def test_deep_stacks_keep_their_innermost_frames():
    async def deeper(event: anyio.Event, left: int) -> None:
        await (deeper(event, left - 1) if left else event.wait())

    stack = await stack_in(lambda event: deeper(event, 200))
    assert len(stack) == MAX_FRAMES
    assert stack[-1] == "wait"


async def test_frames_say_whether_they_are_ours():
    from rollout_service.base.signals import ResettableEvent

    async def wait(event: anyio.Event) -> None:
        ours = ResettableEvent()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ours.wait)
            await event.wait()
            ours.set()

    event, task = anyio.Event(), asyncio.current_task()
    assert task is not None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, event)
        await anyio.wait_all_tasks_blocked()
        waiting = [one for one in asyncio.all_tasks() if one is not task]
        frames = [frame for one in waiting for frame in stack_of_task(one)]
        event.set()
    ours = [frame for frame in frames if frame.ours]
    assert [frame.file for frame in ours] == ["rollout_service/base/signals.py"]
    assert all(not frame.file.startswith("/") for frame in frames if "anyio" in frame.file)


def blocking(is_there: threading.Event, is_over: threading.Event) -> None:
    is_there.set()
    is_over.wait()


async def test_the_culprit_of_a_thread_is_not_the_library():
    is_there, is_over = threading.Event(), threading.Event()
    thread = threading.Thread(target=blocking, args=(is_there, is_over))
    thread.start()
    try:
        assert is_there.wait(10)
        deadline = time.monotonic() + 10
        while True:
            frame = sys._current_frames()[thread.ident or 0]
            stack = stack_of_thread(frame)
            if stack[-1].file.endswith("threading.py") and stack[-1].function.endswith("wait"):
                break
            assert time.monotonic() < deadline
        found = culprit(frame)
        del frame
    finally:
        is_over.set()
        thread.join()
    assert found is not None
    assert found.function == "blocking"
    assert stack[0].function.endswith("_bootstrap")

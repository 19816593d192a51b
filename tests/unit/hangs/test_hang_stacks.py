"""The stacks of what hangs are found, that of a blocked event loop too."""

import asyncio
import json
import os
import signal
import stat
import sys
import threading
import time
import types
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from api_schemas.views.hangs import HangReport
from rollout_service.server.hangs.findings import MAX_FRAMES, culprit, stack_of_task, stack_of_thread
from rollout_service.server.hangs.heartbeat import (
    BLOCKED_SECONDS,
    FILE,
    STACKS,
    LastReport,
    LoopHeartbeat,
    read_last_report,
)
from rollout_service.server.hangs.watch import dumping_stacks
from tests.support.waiting import until


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
    assert found.function == "blocking"
    assert stack[0].function.endswith("_bootstrap")


EMPTY = HangReport(node="n", at=datetime.now(UTC), working=1, loop_lag_seconds=0.0)


def watched(path: Path) -> HangReport:
    """Wait in a thread until a report is there."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if (report := read_last_report(path)) is not None:
            return report
        time.sleep(0.01)
    raise AssertionError("no report was written")


def block_until(is_seen: list[HangReport]) -> None:
    """Keep the event loop until the report of that is there."""
    deadline = time.monotonic() + 15
    while not is_seen and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.slow
async def test_a_blocked_loop_is_reported_while_it_is_blocked(tmp_path):
    heartbeat = LoopHeartbeat(LastReport(tmp_path), lambda task: "r" if task is mine else None)
    heartbeat.report = EMPTY
    mine = asyncio.current_task()
    seen: list[HangReport] = []
    (tmp_path / FILE).write_text("left by a service that was killed")
    with heartbeat.running():
        assert not (tmp_path / FILE).exists()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, lambda: seen.append(watched(tmp_path)))
            await anyio.sleep(0.3)
            assert heartbeat.lag < BLOCKED_SECONDS
            block_until(seen)
        [report] = seen
        assert report.source == "state_folder"
        [finding] = report.findings
        assert (finding.kind, finding.verdict, finding.responds) == ("event_loop", "stuck", False)
        assert finding.subject.startswith("block_until (")
        assert "test_hang_stacks.py" in finding.subject
        assert finding.rollouts == ["r"]
        assert finding.seconds > BLOCKED_SECONDS
        assert any(frame.function == "block_until" for frame in finding.stack)
        assert report.loop_lag_seconds > BLOCKED_SECONDS
        await until(lambda: heartbeat.recent() and not (tmp_path / FILE).exists(), 5)
        [block] = heartbeat.recent()
        assert block.finding_id == finding.finding_id
        assert block.finding().responds is True
        assert heartbeat.lag > BLOCKED_SECONDS


async def test_the_file_is_for_its_owner_alone_and_goes_with_the_block(tmp_path):
    last = LastReport(tmp_path)
    last.write(EMPTY)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert json.loads((tmp_path / FILE).read_text())["node"] == "n"
    with LoopHeartbeat(last, lambda _: None).running():
        await anyio.lowlevel.checkpoint()
    assert not (tmp_path / FILE).exists()
    assert read_last_report(tmp_path) is None


def test_a_report_that_cannot_be_written_or_read_is_no_error(tmp_path):
    LastReport(tmp_path / "gone").write(EMPTY)
    (tmp_path / FILE).write_text("{")
    assert read_last_report(tmp_path) is None


def test_a_signal_writes_the_stacks_of_all_threads(tmp_path):
    path = tmp_path / STACKS
    with dumping_stacks(path):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert "test_a_signal_writes_the_stacks_of_all_threads" in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

"""A test that hangs fails by name, with the stacks of all threads and tasks in the log, and the run always ends.

This plug-in adds three things to pytest-timeout:

- pytest-timeout raises its failure in the event loop, where it does not reach an async test: the test stays suspended,
  and async fixtures cannot close before it ends. The plug-in cancels the test, so that its fixtures close as usual.
- Any failure ends pytest-timeout's alarm, although the fixtures have yet to close. The plug-in sets it again.
- If an alarm does not help, the process ends. pytest-xdist reports the test as failed and starts another worker.
"""

import asyncio
import faulthandler
import functools
import gc
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Generator, Iterator
from inspect import iscoroutinefunction
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any

import anyio
import pytest
from pytest_timeout import Settings

CLOSING_SECONDS = 60
"""How long fixtures may close after a failure, and how long a process may go on after an alarm."""

_LOG = pytest.StashKey[int]()
"""A descriptor of the process's own standard error, which pytest does not capture."""
_LIMIT = pytest.StashKey[Settings]()
_CANCEL = pytest.StashKey[Callable[[], object] | None]()
"""Cancels the coroutine of the test while it runs."""
_PREFIXES = {AsyncGeneratorType: "ag", CoroutineType: "cr", GeneratorType: "gi"}
_AWAITED = {"ag": "ag_await", "cr": "cr_await", "gi": "gi_yieldfrom"}


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LOG] = os.dup(sys.__stderr__.fileno())


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_LOG])


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> Generator[None, bool, bool]:
    """Log all stacks when the alarm goes off, and end the process if the alarm does not help."""
    is_set = yield
    item.stash[_LIMIT] = settings
    fail = signal.getsignal(signal.SIGALRM)

    def on_alarm(number: int, frame: FrameType | None) -> None:
        _log_stacks(item)
        if cancel := item.stash.get(_CANCEL, None):
            item.stash[_CANCEL] = None
            signal.setitimer(signal.ITIMER_REAL, CLOSING_SECONDS / 2)  # for a test that ignores the cancellation
            cancel()
        elif callable(fail):
            fail(number, frame)

    signal.signal(signal.SIGALRM, on_alarm)
    log = item.config.stash[_LOG]
    faulthandler.dump_traceback_later(settings.timeout + CLOSING_SECONDS, exit=True, file=log)
    return is_set


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Set the alarm again for the fixtures, which have yet to close."""
    if limit := node.stash.get(_LIMIT, None):
        node.config.hook.pytest_timeout_set_timer(item=node, settings=limit._replace(timeout=CLOSING_SECONDS))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Let the process go on once the test and its fixtures have ended."""
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Make an async test cancellable."""
    test = pyfuncitem.obj
    if iscoroutinefunction(test):
        pyfuncitem.obj = _cancellable(pyfuncitem, test)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


def _cancellable(item: pytest.Item, test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def cancellable(**fixtures: Any) -> None:
        loop = asyncio.get_running_loop()
        hung: BaseException | None = None
        with anyio.CancelScope() as scope:
            item.stash[_CANCEL] = functools.partial(loop.call_soon_threadsafe, scope.cancel)
            try:
                await test(**fixtures)
            except asyncio.CancelledError as error:
                hung = error
                raise
            finally:
                item.stash[_CANCEL] = None
                if scope.cancel_called:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        if scope.cancelled_caught:
            seconds = item.stash[_LIMIT].timeout
            raise TimeoutError(f"the test took more than {seconds} s; all stacks are in the log") from hung

    return cancellable


def _log_stacks(item: pytest.Item) -> None:
    log = item.config.stash[_LOG]
    os.write(log, f"\n{item.nodeid} took too long\n".encode())
    faulthandler.dump_traceback(log)
    for name, stack in _stacks_of_tasks():
        os.write(log, f"\nTask {name} (most recent call last):\n{''.join(stack.format())}".encode())


def _stacks_of_tasks() -> Iterator[tuple[str, traceback.StackSummary]]:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop is running
        return
    for task in tasks:
        yield task.get_name(), traceback.StackSummary.extract(_frames(task.get_coro()))


def _frames(awaited: Any) -> Iterator[tuple[FrameType, int]]:
    """Follow a coroutine to the innermost one that it awaits."""
    while awaited is not None:
        if prefix := _PREFIXES.get(type(awaited)):
            if frame := getattr(awaited, f"{prefix}_frame"):
                yield frame, frame.f_lineno
            awaited = getattr(awaited, _AWAITED[prefix])
        else:  # a future, or a step of an asynchronous generator, which only the garbage collector can name
            referents = gc.get_referents(awaited)
            awaited = next((one for one in referents if isinstance(one, AsyncGeneratorType)), None)

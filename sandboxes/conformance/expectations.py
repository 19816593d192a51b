"""The type of a check, and the functions that state its expectations."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from sandboxes.contract import BashResult, BashSession, PythonResult, PythonSession, Sandbox, SandboxProvider
from sandboxes.errors import SandboxError

T = TypeVar("T")

Check = Callable[[Sandbox, SandboxProvider], Awaitable[None]]
"""A check gets a fresh sandbox that nothing else uses, and its provider; its docstring is the contract's promise."""

GRACE = 12.0
"""Seconds after its timeout in which a call must return."""


class ConformanceError(AssertionError):
    """A provider breaks the contract; the message says how."""


def expect(holds: bool, found: object) -> None:
    """
    Raises:
        ConformanceError: The condition does not hold.
    """
    if not holds:
        raise ConformanceError(f"found {found!r}")


def expect_cut(result: BashResult | PythonResult, limit: int) -> None:
    """Expect that the output, euro signs alone, was cut between two of them at this limit."""
    head, _note, tail = result.output.partition("\n[")
    tail = tail.partition("]\n")[2]
    expect(result.truncated and set(head) == set(tail) == {"€"}, (limit, result))


async def expect_error(kind: type[SandboxError], call: Awaitable[object]) -> SandboxError:
    """Return the error that the call must raise.

    Raises:
        ConformanceError: The call does not fail.
    """
    try:
        found = await call
    except kind as error:
        return error
    raise ConformanceError(f"no {kind.__name__}, but {found!r}")


async def interrupted(sandbox: Sandbox, session: BashSession | PythonSession, call: Awaitable[T]) -> T:
    """Interrupt the call once it has made the file `running`; return its result."""
    async with anyio.create_task_group() as tasks:

        async def interrupt_soon() -> None:
            while (await sandbox.exec(["rm", "running"])).exit_code != 0:
                pass
            await session.interrupt()

        tasks.start_soon(interrupt_soon)
        result = await call
    return result  # noqa: RET504  mypy: a task group may swallow what is raised in it

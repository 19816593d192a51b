"""The type of a check, and the functions that state its expectations."""

from collections.abc import Awaitable, Callable

from sandboxes.contract import Sandbox, SandboxProvider
from sandboxes.errors import SandboxError

Check = Callable[[Sandbox, SandboxProvider], Awaitable[None]]
"""A check gets a fresh sandbox that nothing else uses, and its provider; its docstring is the contract's promise."""

GRACE = 12.0
"""Seconds after its timeout in which a call must return."""


class ConformanceError(AssertionError):
    """A provider breaks the contract; the message says how."""


def expect(holds: bool, found: object) -> None:
    """Fail with `found` unless the condition holds.

    Raises:
        ConformanceError: The condition does not hold.
    """
    if not holds:
        raise ConformanceError(f"found {found!r}")


async def expect_error(kind: type[SandboxError], call: Awaitable[object]) -> SandboxError:
    """Await a call that must raise an error of `kind`, and return the error.

    Raises:
        ConformanceError: The call does not fail.
    """
    try:
        found = await call
    except kind as error:
        return error
    raise ConformanceError(f"no {kind.__name__}, but {found!r}")

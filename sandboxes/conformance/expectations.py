"""How a check says what it expects, and what a check is."""

from collections.abc import Awaitable, Callable

from sandboxes.contract import Sandbox, SandboxProvider
from sandboxes.errors import SandboxError

Check = Callable[[Sandbox, SandboxProvider], Awaitable[None]]
"""It is given a fresh sandbox, alone in using it, and its provider; its docstring is what the contract promises."""

GRACE = 12.0
"""How many seconds after a time-out a call may still return."""


class ConformanceError(AssertionError):
    """A provider does not keep the contract; the message says in what."""


def expect(holds: bool, found: object) -> None:
    """Fail with what was found instead.

    Raises:
        ConformanceError: it does not hold.
    """
    if not holds:
        raise ConformanceError(f"found {found!r}")


async def expect_error(kind: type[SandboxError], call: Awaitable[object]) -> SandboxError:
    """Await a call that must fail in one way.

    Raises:
        ConformanceError: it does not fail.
    """
    try:
        found = await call
    except kind as error:
        return error
    raise ConformanceError(f"no {kind.__name__}, but {found!r}")

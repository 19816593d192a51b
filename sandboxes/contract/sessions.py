"""The contract of sessions: a persistent bash and a persistent Python.

Their methods raise `SandboxClosedError` once the sandbox is closed or has ended.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from sandboxes.contract.values import BashResult, PythonResult, SessionOutput

DEFAULT_TIMEOUT = 60.0
DEFAULT_OUTPUT_LIMIT = 64 * 1024
OnOutput = Callable[[SessionOutput], object]
"""Gets output as it arrives; what is beyond `output_limit` characters, with 100 more for each piece, does not come."""


class BashSession(ABC):
    """A bash that lives as long as its sandbox. A second `run` waits for the first."""

    @abstractmethod
    async def run(
        self,
        command: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        on_output: OnOutput | None = None,
    ) -> BashResult:
        """Run a command of any number of lines in this session's shell.

        At the timeout the command gets SIGINT, then SIGTERM, then SIGKILL, and its output is returned with `timed_out`.
        The session and processes that it put into the background live on.

        Raises:
            SessionDiedError: The shell ended (`exit`, a kill, or a command that nothing else could stop), now or since
                the last command; raised once. The next `run` starts a new shell in the working folder.
            LimitExceededError: The kernel ended the shell because the sandbox used up its memory.
            ValueError: The command contains a NUL character, or a limit is not positive.
        """

    @abstractmethod
    async def interrupt(self) -> None:
        """Interrupt the running command, if any, as Ctrl-C does.

        Its `run` returns the output and the shell's exit code, 130 for most commands; the session and processes in the
        background live on. A command that goes on gets a second SIGINT after one second; one that ignores both runs
        until its timeout.
        """

    @abstractmethod
    async def restart(self) -> None:
        """End the shell and everything it started, also a running command, then start a new one."""

    @abstractmethod
    async def close(self) -> None:
        """End the session and everything it started, without waiting; it cannot be used again. Idempotent."""


class PythonSession(ABC):
    """An IPython kernel that lives as long as its sandbox. It runs one cell at a time."""

    @abstractmethod
    async def execute(
        self,
        code: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        env: Mapping[str, str] | None = None,
        on_output: OnOutput | None = None,
    ) -> PythonResult:
        """Run a cell. An exception is returned as a result with `error`; at the timeout the cell is interrupted.

        `env` are variables of this cell alone. Values have other formats than plain text only with `on_output`.

        Raises:
            SessionDiedError: The kernel ended, now or since the last cell, or had to be ended because nothing
                else stopped the cell; raised once. The next `execute` starts a new kernel.
            LimitExceededError: The kernel was ended because the sandbox used up its memory.
            SandboxStartError: A new kernel did not start, for example because the image has no ipykernel.
            ValueError: A limit is not positive.
        """

    @abstractmethod
    async def interrupt(self) -> None:
        """Interrupt the running cell, as Ctrl-C does; do nothing if none is running."""

    @abstractmethod
    async def restart(self) -> None:
        """End the kernel and everything it started, also a running cell, then start a new one.

        Raises:
            SandboxStartError: The new kernel did not start.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the session and everything it started, without waiting; it cannot be used again. Idempotent."""

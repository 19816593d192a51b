"""A program that runs in a sandbox while its caller speaks with it."""

from abc import ABC, abstractmethod


class RunningProgram(ABC):
    """The host's side of a program's three streams. Everything that arrives is untrusted."""

    @abstractmethod
    async def send(self, data: bytes) -> bool:
        """Write all of it to the program's standard input; return False if it takes no more.

        Waits while the program does not read. A cancelled call may have written a part.
        """

    @abstractmethod
    def close_input(self) -> None:
        """End its standard input. Idempotent."""

    @abstractmethod
    async def receive(self) -> bytes:
        """Return the next bytes of its standard output, at most 64 KiB; b"" at the end. For one caller at a time."""

    @abstractmethod
    def errors(self) -> str:
        """Return what is known of its standard error, the middle left out if there is much; all of it after `wait`."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait for its end, and return its exit code as a shell reports it.

        Raises:
            SandboxClosedError: The sandbox has ended, and the program with it.
        """

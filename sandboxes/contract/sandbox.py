"""The contract of a sandbox with its programs and files, and of a provider, which starts sandboxes."""

import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from sandboxes.contract.sessions import DEFAULT_OUTPUT_LIMIT, DEFAULT_TIMEOUT, BashSession, PythonSession
from sandboxes.contract.values import (
    ExecResult,
    FileEntry,
    SandboxInfo,
    SandboxSpec,
    SessionName,
    Snapshot,
)
from sandboxes.egress.messages import EgressCounts
from sandboxes.errors import LimitExceededError, SandboxConfigError
from sandboxes.limits.cgroups import Pausing
from sandboxes.reclaim.reaper import SweepReport

DEFAULT_FILE_LIMIT = 16 * 1024 * 1024
DEFAULT_TREE_LIMIT = 1024 * 1024 * 1024


class RunningProgram(ABC):
    """The host's side of the three streams of a program inside. Everything that arrives is untrusted."""

    @property
    @abstractmethod
    def group(self) -> int:
        """The id of its process group, as code inside sees it."""

    @abstractmethod
    async def send(self, data: bytes) -> bool:
        """Write all of it to the program's standard input; return False if it takes no more.

        Waits while the program does not read. A cancelled call may have written a part.
        """

    @abstractmethod
    def close_input(self) -> None: ...

    @abstractmethod
    async def receive(self) -> bytes:
        """Return the next bytes of its standard output, at most 64 KiB; b"" at the end. For one caller at a time."""

    @abstractmethod
    async def receive_errors(self) -> bytes:
        """Return the next bytes of its standard error as `receive` does. The first call takes what `errors` has."""

    @abstractmethod
    def errors(self) -> str:
        """Return its standard error so far, the middle left out if there is much; all of it after `wait`."""

    @abstractmethod
    def leave_group(self) -> None:
        """Let what it has left in the background go on after the block. Call it once the program has ended."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait for its end, and return its exit code as a shell reports it.

        Raises:
            SandboxClosedError: The sandbox has ended, and the program with it.
        """


class Sandbox(ABC):
    """A place to run untrusted code. Use it as an async context manager, or `close` it.

    Whatever needs the sandbox raises `SandboxClosedError` once it is closed or has ended.
    """

    @property
    @abstractmethod
    def id(self) -> str:
        """An id that is unique on this host for as long as the sandbox or anything left of it exists."""

    @property
    @abstractmethod
    def spec(self) -> SandboxSpec: ...

    @property
    @abstractmethod
    def workdir(self) -> str:
        """The working folder as code inside sees it: `spec.workdir` if the provider isolates files."""

    @property
    def listener(self) -> socket.socket | None:
        """A socket that listens at `LISTENER_ADDRESS` on the loopback inside; None unless `spec.listens`.

        The owner accepts connections from it, and they reach nothing else. It is closed with the sandbox. Where code
        inside has the host's network, the port is another, and every program of the host can connect to it.
        """
        return None

    @property
    def running(self) -> bool:
        """Whether the sandbox itself runs, as far as is known without asking; its sessions may have ended."""
        return self.healthy

    @property
    def healthy(self) -> bool:
        """Whether the sandbox and every open session run, as far as is known without asking; takes no time."""
        return True

    @property
    def limits_reached(self) -> tuple[LimitExceededError, ...]:
        """The limits that the sandbox as a whole has reached, such as that of its memory, each once; read it before
        `close`. Empty where the provider does not see them."""
        return ()

    @property
    def pid(self) -> int | None:
        """The process on the host below which everything inside runs; None if it cannot be seen."""
        return None

    @property
    def interpreter(self) -> str:
        """The Python of the sandbox's Python session: a name or a path inside."""
        return "python3"

    async def responds(self, seconds: float) -> bool:  # noqa: ARG002 - here, nothing is asked
        """Return whether the sandbox itself answers within this time, whatever the programs inside do."""
        return self.healthy

    @abstractmethod
    async def bash(self) -> BashSession:
        """Return the agent's bash. The first call opens it, later calls return the same session.

        Raises:
            SandboxStartError: The shell did not start.
        """

    @abstractmethod
    async def python(self) -> PythonSession:
        """Return the agent's IPython kernel. The first call opens it, later calls return the same session.

        Raises:
            SandboxStartError: The kernel did not start, for example because the image has no ipykernel.
            SessionDiedError: An earlier kernel ended, and a new one did not start.
        """

    async def open_session(self, name: SessionName, *, cwd: str | None = None) -> BashSession | PythonSession:
        """Open another session, with a state of its own, in the working folder or another; `close` it after use.

        Raises:
            SandboxStartError: It did not start.
            SandboxConfigError: The provider has only one session of a kind.
        """
        raise SandboxConfigError(f"this provider has no other session of {name} in {cwd or 'a sandbox'}")

    @abstractmethod
    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run a program outside the sessions, several at once if need be.

        A program that does not exist gives exit code 127, as in a shell. At the timeout its process group is ended;
        otherwise its background processes go on. `output_limit` applies to each of the two streams.

        Raises:
            ValueError: `argv` is empty, a string contains a NUL character, or a limit is not positive.
        """

    @abstractmethod
    def program(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[RunningProgram]:
        """Start a program outside the sessions, and exchange bytes with it within the block.

        At the end of the block the program's process group is killed, unless `leave_group` was called. Several may run
        at once. A program that does not exist ends at once with exit code 127.

        Raises:
            SandboxStartError: The program did not start, for example because no process was left.
            ValueError: `argv` is empty, or a string contains a NUL character.
        """

    async def list_running(self) -> list[str]:
        """Return the command lines of the processes inside besides the sessions, each once and shortened, for people.

        They are the processes' own words. Empty where the provider does not see them.
        """
        return []

    @abstractmethod
    async def end_processes(self) -> None:
        """End the sessions and every other process inside. Files stay, and new sessions may be opened.

        When it returns, the host has seen that they ended. Call it before running anything trusted, such as a
        grader, in a sandbox that an agent has used.

        Raises:
            SandboxClosedError: A process does not end.
        """

    @abstractmethod
    async def read_file(self, path: str, *, limit: int = DEFAULT_FILE_LIMIT) -> bytes:
        """Return the contents. A relative path begins at the working folder.

        Raises:
            FileMissingError: There is no such file.
            FileTooLargeError: The file has more than `limit` bytes.
            SandboxFileError: The file cannot be read, for example because it is a folder.
        """

    @abstractmethod
    def read_stream(self, path: str, *, limit: int | None = None) -> AsyncGenerator[bytes, None]:
        """Read a file of any size in chunks of at most 64 KiB, as fast as the caller takes them, in constant memory.

        They hold the contents of the file when it was opened; anything appended later is left out. Close the generator
        (`contextlib.aclosing`) if you leave it before its end.

        Raises:
            FileMissingError: There is no such file.
            FileTooLargeError: The file has more than `limit` bytes; None sets no limit.
            FileStalledError: No byte of the file arrived for half a minute.
            SandboxFileError: The file cannot be read, is not a file, or shrank while it was read.
        """

    @abstractmethod
    async def write_file(self, path: str, data: bytes | str) -> None:
        """Write a file, creating its parent folders; text is written as UTF-8.

        The file is written completely or stays as it was. An existing file keeps its mode; a link is written through.

        Raises:
            DiskFullError: There is no room for the file in the sandbox.
            SandboxFileError: The file cannot be written, for example because it is a folder or a device.
        """

    @abstractmethod
    async def write_stream(self, path: str, data: AsyncIterable[bytes]) -> None:
        """Write a file of any size from a stream, as `write_file` does, in constant memory.

        If the stream raises, or the call is cancelled, the file stays as it was.

        Raises:
            DiskFullError: There is no room for the file in the sandbox.
            FileStalledError: The sandbox took no byte of the file for half a minute.
            SandboxFileError: The file cannot be written.
        """

    @abstractmethod
    async def edit_file(self, path: str, old: str, new: str, *, replace_all: bool = False) -> int:
        """Replace `old`, which must occur exactly once unless `replace_all`; return the number of replacements.

        Raises:
            EditMatchError: `old` does not occur, or occurs more than once.
            FileMissingError: There is no such file.
            FileTooLargeError: The file is, or would be, larger than `DEFAULT_FILE_LIMIT`.
            SandboxFileError: The file is not UTF-8 text, or cannot be read or written.
        """

    @abstractmethod
    async def list(self, path: str = ".") -> list[FileEntry]:
        """Return the entries of a folder by name, without `.` and `..`. Links are not followed.

        Raises:
            FileMissingError: There is no such folder.
            FileTooLargeError: The folder has more entries than a listing may hold.
            SandboxFileError: The folder cannot be listed.
        """

    @abstractmethod
    def export_path(self, path: str, *, limit: int = DEFAULT_TREE_LIMIT) -> AsyncGenerator[bytes, None]:
        """Read a file or folder as a tar stream with one top-level entry, named after the last part of the path.

        The host reads it; nothing runs inside. Entries are folders, regular files, hard links to files of the stream,
        and symbolic links that stay within the path. Anything else is left out, as are owners, attributes and modes
        beyond the nine bits. Files are read even if their modes forbid it, and their contents are hostile. Call
        `end_processes` first, or the tree may change meanwhile. Close the generator (`contextlib.aclosing`) if you
        leave it before its end.

        Raises:
            FileMissingError: There is no such path.
            FileTooLargeError: The tree is larger than `limit`. A file counts with its whole size, holes included, and
                every entry with at least 4 KiB. Discard the output before.
            SandboxFileError: The tree cannot be read.
        """

    @abstractmethod
    async def import_path(self, parent: str, tar: AsyncIterable[bytes]) -> None:
        """Unpack a tar stream below the folder `parent`, which is created if it is missing.

        Raises:
            DiskFullError: There is no room for the files in the sandbox.
            FileStalledError: The sandbox took no byte of the stream for half a minute.
            SandboxFileError: The stream cannot be unpacked.
        """

    async def snapshot(self) -> Snapshot:
        """End the sandbox and its processes, and return its files for others to start from (`SandboxSpec.snapshot`).

        Each sandbox that starts from them has its own view of them. Files of the provider's own mounts are not among
        them: /dev, /dev/shm, /etc/hosts, /etc/resolv.conf, /etc/passwd and /etc/group. A hard link becomes a file of
        its own once it is changed, as in the image.

        Raises:
            SandboxConfigError: This provider takes no snapshots here; see `SandboxProvider.takes_snapshots`.
        """
        raise SandboxConfigError("this provider takes no snapshots of sandboxes")

    def save(self, *, limit: int = DEFAULT_TREE_LIMIT) -> AsyncGenerator[bytes, None]:
        """Read what the sandbox has beyond its image and its snapshot, for another to begin with (`SandboxSpec.saved`).

        That is its files, as in `snapshot`, and the state of its bash: see `sandboxes.sessions.bash_state`. The sandbox
        goes on; nothing may use it meanwhile. Close the generator (`contextlib.aclosing`) if you leave it early.

        Raises:
            SandboxUnsavedError: It has something else: a program in the background, a Python that has run code, or open
                files of its bash.
            FileTooLargeError: The files are larger than `limit`, counted as in `export_path`. Discard the output.
            SandboxConfigError: Sandboxes cannot be saved here; see `SandboxProvider.saves`.
        """
        _ = limit
        raise SandboxConfigError("this provider cannot save sandboxes")

    async def pause(self) -> bool:
        """Stop everything inside until the sandbox is used again; return whether it is stopped.

        It is not if a call or a program is under way or begins meanwhile, or if the sandbox `listens`. Every call but
        `list_running`, `responds` and `reclaim` lets it go on first; so does the end of its lifetime. Programs in the
        background find that time has passed.

        Raises:
            SandboxConfigError: Sandboxes cannot be paused here; see `SandboxProvider.pausing`.
            SandboxPauseError: It was not stopped.
        """
        raise SandboxConfigError("this provider cannot pause sandboxes")

    async def reclaim(self) -> int:
        """Give the host what it can get of a paused sandbox's memory; return how many bytes. Contents are kept."""
        return 0

    @abstractmethod
    async def close(self) -> None:
        """End everything inside and remove the sandbox's resources.

        Idempotent and shielded. It never raises because of anything that code inside did.
        """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class SandboxProvider(ABC):
    """Starts sandboxes on this host, knows which are alive, and cleans up after dead services."""

    name: str
    isolates: bool
    """Whether code inside is kept from the host; False means that the code must be trusted."""

    @property
    def known_failures(self) -> Mapping[str, str]:
        """The checks of `sandboxes.conformance` that this provider fails, by name, with the reason."""
        return {}

    @property
    def enforced(self) -> frozenset[str]:
        """The limits that hold here for a whole sandbox: "memory", "processes", "cpus", "disk", and "users" for
        resources that the kernel counts by user of the host."""
        return frozenset()

    @property
    def pausing(self) -> Pausing:
        """How far `Sandbox.pause` and `Sandbox.reclaim` work here."""
        return "none"

    async def takes_snapshots(self, spec: SandboxSpec) -> bool:  # noqa: ARG002 - a working default: none
        """Return whether sandboxes of this specification can become snapshots here."""
        return False

    async def saves(self, spec: SandboxSpec) -> bool:  # noqa: ARG002 - a working default: none
        """Return whether sandboxes of this specification can be saved here, and begin with what was saved."""
        return False

    async def identity(self, spec: SandboxSpec) -> str:
        """Return a text that changes whenever the files that such a sandbox is made from change.

        A warm sandbox is reused only if this value is unchanged. It is "" if there are no such files.

        Raises:
            ImageNotFoundError: There is no such image.
            SandboxConfigError: The specification cannot be met.
        """
        _ = spec  # a working default: nothing of the host shows through
        return ""

    @property
    def limit_violations(self) -> Mapping[str, int]:
        """How often each limit was reached in all sandboxes since the provider was created."""
        return {}

    @property
    def lingering(self) -> int:
        """Number of processes of closed sandboxes that were killed and have not ended yet."""
        return 0

    @property
    def used_seconds(self) -> float:
        """How long all sandboxes on servers that may ask money for them have lived since the provider was created."""
        return 0.0

    async def egress_counts(self) -> EgressCounts:
        """Return the traffic of all sandboxes through their allow lists since the provider was created."""
        return EgressCounts()

    @abstractmethod
    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox that is ready to run commands. A cancelled start leaves nothing behind.

        Raises:
            ProviderUnavailableError: This host cannot run this provider's sandboxes.
            ImageNotFoundError: There is no such image.
            ImageError: The image cannot be used.
            SandboxConfigError: The specification cannot be met.
            SandboxStartError: The sandbox did not start, or not in time.
        """

    @abstractmethod
    async def sweep(self) -> SweepReport:
        """End the processes and remove the files that dead services left on this host; live services are left alone."""

    @abstractmethod
    def live(self) -> list[SandboxInfo]:
        """Return the live sandboxes of this provider, oldest first."""

    @abstractmethod
    async def close(self) -> None:
        """Close every live sandbox. Idempotent and shielded."""

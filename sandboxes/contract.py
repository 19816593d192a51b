"""What a sandbox is: the types that a provider implements and that the rest of the service uses.

Guarantees that every provider makes, and that `sandboxes.conformance` checks:
- a session keeps its state (working folder, variables, imports) between calls, also after a time-out;
- a call ends within its time-out and a few seconds of grace, whatever the code inside does;
- output is bounded: what is over the limit is cut in the middle, and memory here does not grow with it;
- `close` is idempotent, may be called at any time, is shielded from cancellation, and leaves nothing behind.

Code inside is hostile: nothing that it writes is trusted, and no path of it is ever resolved on the host.
Times are in seconds, sizes in bytes, unless a name says otherwise.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from sandboxes.egress.counts import EgressCounts
from sandboxes.errors import LimitExceededError

DEFAULT_TIMEOUT = 60.0
DEFAULT_OUTPUT_LIMIT = 64 * 1024
DEFAULT_FILE_LIMIT = 16 * 1024 * 1024
DEFAULT_TREE_LIMIT = 1024 * 1024 * 1024

Network = Literal["none", "full"] | tuple[str, ...]
"""What a sandbox reaches. "none": a loopback of its own and nothing else. A tuple is an allow list of hosts, each
`HOST`, `*.HOST` or either with `:PORT` (443 and 80 without one), through an egress proxy that the environment's
proxy variables name. "full": the host's own network, with its loopback; never for hostile code."""

SessionName = Literal["bash", "python"]


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or folder of the host that the sandbox sees at `target` and cannot change."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What one sandbox is made of and may use. None as a limit means the provider's default."""

    image: str | None = None
    """A name, a path or a reference; None is the provider's default image."""

    network: Network = "none"
    memory_bytes: int | None = None
    max_processes: int | None = None
    """Processes and threads alive at once."""

    cpus: float | None = None
    disk_bytes: int | None = None
    """What the sandbox may write outside of memory file systems, in all."""

    lifetime_seconds: float | None = None
    """How long it may live, whatever it does; then it is closed and every call raises LimitExceededError."""

    env: Mapping[str, str] = field(default_factory=dict)
    read_only_binds: Sequence[Bind] = ()
    workdir: str = "/workspace"
    """Where sessions start and relative paths begin; made if it is missing."""

    sessions: frozenset[SessionName] = frozenset()
    """Those that will be used: a hint, by which a warm pool opens them ahead. Every session opens when asked for."""

    label: str = ""
    """For people and logs: which rollout this sandbox belongs to."""

    def __post_init__(self) -> None:
        network: object = self.network
        if isinstance(network, list):  # kinds of sandboxes are told apart by hashing
            object.__setattr__(self, "network", tuple(network))


@dataclass(frozen=True, slots=True)
class BashResult:
    """One command of a bash session; standard output and error come as one text, in the order written."""

    output: str
    exit_code: int | None
    """None when the command was interrupted by its time-out."""

    timed_out: bool
    truncated: bool
    seconds: float

    limit_violations: tuple[LimitExceededError, ...] = ()
    """Limits of the sandbox that were reached meanwhile and that the session survived, each once."""


@dataclass(frozen=True, slots=True)
class PythonErrorInfo:
    """An exception that the code raised: its class, its text, and the traceback without terminal colours."""

    ename: str
    evalue: str
    traceback: str


@dataclass(frozen=True, slots=True)
class PythonResult:
    """One cell of a Python session."""

    output: str
    """What the cell printed, both streams, and what it displayed as text."""

    result: str | None
    """The text of the last expression's value, or None where the cell has none."""

    error: PythonErrorInfo | None
    timed_out: bool
    truncated: bool
    seconds: float

    limit_violations: tuple[LimitExceededError, ...] = ()
    """Limits of the sandbox that were reached meanwhile and that the session survived, each once."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """One process of its own, apart from the sessions."""

    exit_code: int | None
    """As a shell counts: 128 + signal for a process that a signal ended; None after a time-out."""

    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool

    limit_violations: tuple[LimitExceededError, ...] = ()
    """Limits of the sandbox that were reached meanwhile and that the session survived, each once."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry of a folder in a sandbox."""

    name: str
    """Bytes that are no UTF-8 are surrogate escapes, as of `os.fsdecode`: as part of a path it finds the file."""

    kind: Literal["file", "directory", "symlink", "other"]
    size: int


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """One live sandbox, for operators."""

    id: str
    label: str
    image: str
    provider: str
    started_at: float
    """Unix time."""

    pid: int | None
    """The launcher's process on the host."""

    state: Literal["in_use", "warm"] = "in_use"
    """A warm one waits in a pool and is nobody's yet."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What `sweep` removed of services that died: counts, and what could not be removed and why."""

    sandboxes: int = 0
    processes: int = 0
    failures: tuple[str, ...] = ()


class BashSession(ABC):
    """A bash that lives as long as its sandbox. One command at a time: a second `run` waits for the first."""

    @abstractmethod
    async def run(
        self, command: str, *, timeout: float = DEFAULT_TIMEOUT, output_limit: int = DEFAULT_OUTPUT_LIMIT
    ) -> BashResult:
        """Run a command, of any number of lines, in this session's shell.

        At the time-out the command gets SIGINT, then SIGTERM, then SIGKILL; what it printed is returned with
        `timed_out`, and the session goes on. Processes that it put into the background live on.

        Raises:
            SessionDiedError: the shell ended (`exit`, a kill, or a command that nothing else could stop), now
                or since the last command; said once. The next `run` starts a new shell in the working folder.
            LimitExceededError: the kernel ended the shell because the sandbox used up its memory.
            SandboxClosedError: the sandbox is closed or has ended.
            ValueError: the command holds a NUL character, or a limit is not positive.
        """

    @abstractmethod
    async def interrupt(self) -> None:
        """Interrupt the running command, as Ctrl-C does; without one, nothing happens.

        Its `run` returns what was printed and the exit code that the shell gives, 130 for most commands; the session
        stays. Processes in the background live on. SIGINT is sent again, a second after, to a command that goes on; one
        that ignores it runs on to its time-out.

        Raises:
            SandboxClosedError: the sandbox is closed or has ended.
        """

    @abstractmethod
    async def restart(self) -> None:
        """End the shell and what it started, and begin a fresh one.

        Raises:
            SandboxClosedError: the sandbox is closed or has ended.
        """


class PythonSession(ABC):
    """An IPython kernel that lives as long as its sandbox. One cell at a time."""

    @abstractmethod
    async def execute(
        self, code: str, *, timeout: float = DEFAULT_TIMEOUT, output_limit: int = DEFAULT_OUTPUT_LIMIT
    ) -> PythonResult:
        """Run a cell. An exception is a result with `error`; at the time-out the cell is interrupted.

        Raises:
            SessionDiedError: the kernel ended, now or since the last cell, or had to be ended since nothing
                else stopped the cell; said once. The next `execute` starts a new kernel.
            LimitExceededError: the kernel was ended because the sandbox used up its memory.
            SandboxStartError: a new kernel did not come up, for example as the image has no ipykernel.
            SandboxClosedError: the sandbox is closed or has ended.
            ValueError: a limit is not positive.
        """

    @abstractmethod
    async def interrupt(self) -> None:
        """Interrupt the running cell, as Ctrl-C does; without one, nothing happens.

        Raises:
            SandboxClosedError: the sandbox is closed or has ended.
        """

    @abstractmethod
    async def restart(self) -> None:
        """End the kernel and what it started, and begin a fresh one.

        Raises:
            SandboxStartError: the new kernel did not come up.
            SandboxClosedError: the sandbox is closed or has ended.
        """


class Sandbox(ABC):
    """A place to run untrusted code. Use it as an async context manager, or `close` it."""

    @property
    @abstractmethod
    def id(self) -> str:
        """Unique on this host for as long as the sandbox or anything left of it exists."""

    @property
    @abstractmethod
    def spec(self) -> SandboxSpec:
        """What it was started with."""

    @property
    @abstractmethod
    def workdir(self) -> str:
        """Where code inside finds the working folder: `spec.workdir` if the provider isolates files."""

    @property
    def healthy(self) -> bool:
        """Whether it and every session that was opened run, as far as is known without asking; takes no time."""
        return True

    @abstractmethod
    async def bash(self) -> BashSession:
        """The agent's bash, opened at the first call and the same one after.

        Raises:
            SandboxStartError: the shell did not come up.
            SandboxClosedError: the sandbox is closed or has ended.
        """

    @abstractmethod
    async def python(self) -> PythonSession:
        """Return the agent's IPython kernel, which the first call opens.

        Raises:
            SandboxStartError: the kernel did not come up, for example as the image has no ipykernel.
            SandboxClosedError: the sandbox is closed or has ended.
            SessionDiedError: there was a kernel before, and another did not come up.
        """

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
        """Run one program in a process of its own, apart from the sessions; several may run at once.

        A program that is not there gives exit code 127, as in a shell. At the time-out its process group is
        ended. `output_limit` holds for each of the two streams.

        Raises:
            SandboxClosedError: the sandbox is closed or has ended.
            ValueError: `argv` is empty, a string holds a NUL character, or a limit is not positive.
        """

    @abstractmethod
    async def end_processes(self) -> None:
        """End the sessions and every other process inside; files stay, and new sessions may be opened.

        When it returns, the host has seen that they ended. Call it before trusting what runs in a sandbox after an
        agent, such as a grader.

        Raises:
            SandboxClosedError: the sandbox is closed or has ended, or a process does not end.
        """

    @abstractmethod
    async def read_file(self, path: str, *, limit: int = DEFAULT_FILE_LIMIT) -> bytes:
        """The contents of a file; a relative path begins at the working folder.

        Raises:
            FileMissingError: there is no such file.
            FileTooLargeError: it has more than `limit` bytes.
            SandboxFileError: it cannot be read, for example as it is a folder.
            SandboxClosedError: the sandbox is closed or has ended.
        """

    @abstractmethod
    def read_stream(self, path: str, *, limit: int | None = None) -> AsyncGenerator[bytes, None]:
        """Read a file of any size in pieces of at most 64 KiB, as fast as they are taken.

        They are the bytes that it had when it was opened: what is appended meanwhile is left out. Memory here does
        not grow with the file. Close the generator (`contextlib.aclosing`) when leaving it before its end.

        Raises:
            FileMissingError: there is no such file.
            FileTooLargeError: it has more than `limit` bytes; None is no limit.
            FileStalledError: nothing of it came for half a minute.
            SandboxFileError: it cannot be read, is not a file, or became shorter meanwhile.
            SandboxClosedError: the sandbox is closed or has ended.
        """

    @abstractmethod
    async def write_file(self, path: str, data: bytes | str) -> None:
        """Write a file, making the folders above it; text is written as UTF-8.

        It is there whole, or as it was before. One that is there keeps its mode; a link is written through.

        Raises:
            DiskFullError: there is no room for it in the sandbox.
            SandboxFileError: it cannot be written, for example as it is a folder or a device.
            SandboxClosedError: the sandbox is closed or has ended.
        """

    @abstractmethod
    async def write_stream(self, path: str, data: AsyncIterable[bytes]) -> None:
        """Write a file of any size from a stream, as `write_file` does; memory here does not grow with it.

        Where the stream raises, or the call is cancelled, the file is as it was before.

        Raises:
            DiskFullError: there is no room for it in the sandbox.
            FileStalledError: the sandbox took nothing of it for half a minute.
            SandboxFileError: it cannot be written.
            SandboxClosedError: the sandbox is closed or has ended.
        """

    @abstractmethod
    async def edit_file(self, path: str, old: str, new: str, *, replace_all: bool = False) -> int:
        """Replace `old`, which must be in the file exactly once unless `replace_all`; how many were replaced.

        Raises:
            EditMatchError: `old` is not there, or more than once.
            FileMissingError: there is no such file.
            FileTooLargeError: it is larger than `DEFAULT_FILE_LIMIT`.
            SandboxFileError: it is no UTF-8 text, or cannot be read or written.
            SandboxClosedError: the sandbox is closed or has ended.
        """

    @abstractmethod
    async def list(self, path: str = ".") -> list[FileEntry]:
        """The entries of a folder by name, without `.` and `..`; links are not followed.

        Raises:
            FileMissingError: there is no such folder.
            FileTooLargeError: it has more entries than a listing may hold.
            SandboxFileError: it cannot be listed.
            SandboxClosedError: the sandbox is closed or has ended.
        """

    @abstractmethod
    def export_path(self, path: str, *, limit: int = DEFAULT_TREE_LIMIT) -> AsyncGenerator[bytes, None]:
        """Read a file or folder as a tar stream, whose one top entry is named as the last part of the path.

        It is read from the host's side: nothing inside is run. Entries are folders, regular files, hard links to files
        of the stream, and symbolic links that stay within the path; anything else is left out, as are owners,
        attributes and modes beyond the nine bits. Files that their modes forbid to read are read. What the files hold
        is as hostile as the code inside. Call `end_processes` first, or the tree may change meanwhile. Close the
        generator (`contextlib.aclosing`) when leaving it before its end.

        Raises:
            FileMissingError: there is no such path.
            FileTooLargeError: the tree is larger than `limit`, where a file counts with its whole size, also where it
                has holes, and every entry with 4 KiB at least; what came before is to be thrown away.
            SandboxFileError: the tree cannot be read.
            SandboxClosedError: the sandbox is closed or has ended.
        """

    @abstractmethod
    async def import_path(self, parent: str, tar: AsyncIterable[bytes]) -> None:
        """Unpack a tar stream below the folder `parent`, which is made if it is missing.

        Raises:
            DiskFullError: there is no room for it in the sandbox.
            FileStalledError: the sandbox took nothing of it for half a minute.
            SandboxFileError: it cannot be unpacked.
            SandboxClosedError: the sandbox is closed or has ended.
        """

    @abstractmethod
    async def close(self) -> None:
        """End everything inside and remove what belongs to the sandbox. Idempotent, shielded, never raises
        for what code inside did."""

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
    """Starts sandboxes on this host, knows which live, and cleans up after services that died."""

    name: str
    isolates: bool
    """Whether code inside is kept from the host; False says that the code must be trusted."""

    @property
    def known_failures(self) -> Mapping[str, str]:
        """Checks of `sandboxes.conformance` that this provider fails, by name, and why."""
        return {}

    @property
    def enforced(self) -> frozenset[str]:
        """The limits that hold here for a sandbox as a whole: of "memory", "processes", "cpus", "disk", and "users" for
        what the kernel counts by user of the host."""
        return frozenset()

    async def identity(self, spec: SandboxSpec) -> str:
        """A text that changes whenever the files do that a sandbox of this specification would be made from.

        Sandboxes that were started ahead are handed out only while it is what it was. "" where there are no such
        files.

        Raises:
            ImageNotFoundError: there is no such image.
            SandboxConfigError: the specification cannot be met.
        """
        _ = spec  # a working default: nothing of the host shows through
        return ""

    @property
    def limit_violations(self) -> Mapping[str, int]:
        """How often each limit was reached, in all sandboxes together, since the provider was made."""
        return {}

    @property
    def lingering(self) -> int:
        """How many processes of closed sandboxes were killed and have not ended yet."""
        return 0

    async def egress_counts(self) -> EgressCounts:
        """What all sandboxes together have done through their lists of hosts since the provider was made."""
        return EgressCounts()

    @abstractmethod
    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; when it returns, commands can be run in it. A cancelled start leaves nothing.

        Raises:
            ProviderUnavailableError: this host cannot run this provider's sandboxes.
            ImageNotFoundError: there is no such image.
            ImageError: the image cannot be used.
            SandboxConfigError: the specification cannot be met.
            SandboxStartError: it did not come up, or not in time.
        """

    @abstractmethod
    async def sweep(self) -> SweepReport:
        """End and remove what services that died left on this host; live services are left alone."""

    @abstractmethod
    def live(self) -> list[SandboxInfo]:
        """The sandboxes of this provider that are alive, oldest first."""

    @abstractmethod
    async def close(self) -> None:
        """Close every live sandbox. Idempotent and shielded."""

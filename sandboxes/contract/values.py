"""Specifications, results, and records for operators."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sandboxes.errors import LimitExceededError

Network = Literal["none", "full"] | tuple[str, ...]
""""none" is its own loopback and nothing else. A tuple is an allow list of hosts: each is `HOST` or `*.HOST`, with or
without `:PORT` (443 and 80 by default), and is reached through an egress proxy that the proxy variables name. "full" is
the host's own network, including its loopback; never use it for hostile code.
"""

LISTENER_ADDRESS = ("127.0.0.1", 47747)
"""Where a sandbox with its own network finds its owner; always the same, so that programs print the same."""

DEFAULT_WORKDIR = "/workspace"
"""The working folder in images that name none."""

SessionName = Literal["bash", "python"]


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or folder of the host that the sandbox sees at `target` and cannot change."""

    source: str
    target: str


class Snapshot(ABC):
    """The files of a sandbox as they were at its end, for any number of others to start from."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """How much of the host's memory or disk it takes up, apart from its image."""

    @abstractmethod
    async def close(self) -> None:
        """Let no more sandboxes start from it. Those that did keep the files. Idempotent and shielded."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """A limit of None is the provider's default."""

    image: str | None = None
    """A name, a path or a reference; None is the provider's default image."""

    snapshot: Snapshot | None = None
    """The files to start from, made with the same image; what they take up counts toward no limit of this sandbox."""

    saved: Path | None = None
    """A file with what `Sandbox.save` gave, to begin with, made with the same image and a snapshot of the same files.
    It is read during the start, and what it holds counts toward the limits of this sandbox."""

    network: Network = "none"
    memory_bytes: int | None = None
    max_processes: int | None = None
    """Processes and threads alive at once."""

    cpus: float | None = None
    disk_bytes: int | None = None
    """The total size of the sandbox's writes outside memory file systems."""

    lifetime_seconds: float | None = None
    """How long it may live, whatever it does. After that it is closed, and every call raises LimitExceededError."""

    listens: bool = False
    """Whether programs inside can connect to the sandbox's owner: see `Sandbox.listener`."""

    env: Mapping[str, str] = field(default_factory=dict)
    read_only_binds: Sequence[Bind] = ()
    workdir: str = ""
    """Where sessions start and relative paths begin; created if it is missing. "" is the image's own (WORKDIR), or
    `DEFAULT_WORKDIR` if it has none or the provider cannot know it. A started sandbox's specification says which."""

    sessions: frozenset[SessionName] = frozenset()
    """The sessions that will be used: a hint for a warm pool to open them ahead. Others open on first use."""

    label: str = ""
    """The rollout that this sandbox belongs to, for people and logs."""

    def __post_init__(self) -> None:
        network: object = self.network
        if isinstance(network, list):  # kinds of sandboxes are told apart by hashing
            object.__setattr__(self, "network", tuple(network))


@dataclass(frozen=True, slots=True)
class BashResult:
    """Standard output and error are one text, in the order written."""

    output: str
    exit_code: int | None
    """None if the command was interrupted by its timeout."""

    timed_out: bool
    truncated: bool
    seconds: float

    limit_violations: tuple[LimitExceededError, ...] = ()
    """Limits of the sandbox that were reached during the call and that the session survived, each once."""


@dataclass(frozen=True, slots=True)
class SessionOutput:
    """A piece of what a command or cell gives while it runs. It is as untrusted as the code."""

    kind: Literal["stdout", "stderr", "display", "result"]
    """Bash has only the first; "result" is the value of a cell's last expression."""

    formats: Mapping[str, str]
    """The same thing by MIME types. What was printed is "text/plain"; pictures are Base64, and JSON is its text."""


@dataclass(frozen=True, slots=True)
class PythonErrorInfo:
    """The class and text of an exception that the code raised, and the traceback without terminal colors."""

    ename: str
    evalue: str
    traceback: str


@dataclass(frozen=True, slots=True)
class PythonResult:
    output: str
    """The text that the cell printed to both streams or displayed."""

    result: str | None
    """The text of the last expression's value, or None if the cell has none."""

    error: PythonErrorInfo | None
    timed_out: bool
    truncated: bool
    seconds: float

    limit_violations: tuple[LimitExceededError, ...] = ()
    """Limits of the sandbox that were reached during the call and that the session survived, each once."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    exit_code: int | None
    """As a shell reports it: 128 + signal for a process that a signal ended; None after a timeout."""

    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool

    limit_violations: tuple[LimitExceededError, ...] = ()
    """Limits of the sandbox that were reached during the call and that the session survived, each once."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    name: str
    """Bytes that are not UTF-8 are surrogate escapes, as in `os.fsdecode`, so a path with this name finds the file."""

    kind: Literal["file", "directory", "symlink", "other"]
    size: int


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A record of one live sandbox, for operators."""

    id: str
    label: str
    image: str
    provider: str
    started_at: float
    """Unix time."""

    pid: int | None
    """The launcher's process on the host."""

    state: Literal["in_use", "paused", "warm"] = "in_use"
    """A warm sandbox waits in a pool and belongs to nobody yet; in a paused one nothing runs until it is used."""

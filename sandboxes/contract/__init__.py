"""The contract of a sandbox: what a provider implements and the rest of the service relies on.

Every provider guarantees the following, and `sandboxes.conformance` checks it:
- a session keeps its state (working folder, variables, imports) between calls, even after a timeout;
- a call ends within its timeout plus a few seconds of grace, whatever the code inside does;
- output is bounded: anything over the limit is cut from the middle, and memory use here does not grow with it;
- `close` is idempotent, may be called at any time, is shielded from cancellation, and leaves nothing behind.

Code inside is hostile: nothing it writes is trusted, and no path it names is ever resolved on the host. Times are in
seconds and sizes in bytes unless a name says otherwise.
"""

from sandboxes.contract.sandbox import (
    DEFAULT_FILE_LIMIT,
    DEFAULT_TREE_LIMIT,
    RunningProgram,
    Sandbox,
    SandboxProvider,
)
from sandboxes.contract.sessions import DEFAULT_OUTPUT_LIMIT, DEFAULT_TIMEOUT, BashSession, OnOutput, PythonSession
from sandboxes.contract.values import (
    DEFAULT_WORKDIR,
    LISTENER_ADDRESS,
    BashResult,
    Bind,
    ExecResult,
    FileEntry,
    Network,
    PythonErrorInfo,
    PythonResult,
    SandboxInfo,
    SandboxSpec,
    SessionName,
    SessionOutput,
    Snapshot,
)
from sandboxes.limits.cgroups import Pausing
from sandboxes.reclaim.reaper import SweepReport

__all__ = [
    "DEFAULT_FILE_LIMIT",
    "DEFAULT_OUTPUT_LIMIT",
    "DEFAULT_TIMEOUT",
    "DEFAULT_TREE_LIMIT",
    "DEFAULT_WORKDIR",
    "LISTENER_ADDRESS",
    "BashResult",
    "BashSession",
    "Bind",
    "ExecResult",
    "FileEntry",
    "Network",
    "OnOutput",
    "Pausing",
    "PythonErrorInfo",
    "PythonResult",
    "PythonSession",
    "RunningProgram",
    "Sandbox",
    "SandboxInfo",
    "SandboxProvider",
    "SandboxSpec",
    "SessionName",
    "SessionOutput",
    "Snapshot",
    "SweepReport",
]

"""Run the steps of builds in namespaces, by the program in `step`.

As root, and for a user with subordinate ids, 65,536 ids are mapped, so an image may have any users; only `remove` can
remove their files. A user without such ids gets a namespace with one, in which calls that change an owner or the user
succeed without effect: packages install, and all files belong to root.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from sandboxes.errors import ImageBuildError
from sandboxes.host.facts import NAMESPACES_HINT
from sandboxes.host.kernel_calls import alone
from sandboxes.host.subordinate_ids import SUBGID, SUBUID, has_subordinate_ids, subordinate_ids_of
from sandboxes.host.uid_leases import covered_by_this_namespace
from sandboxes.images.facts import PATH
from sandboxes.reclaim.rmtree import remove_tree

COUNT = 65_536
ROOT_IDS = 1_879_048_192 - COUNT
"""The first id of the host that root's builds use: below those of sandboxes, above all that systems give out."""

LAST_LINES = 15
ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)")
"""Terminal escapes, which neither a log nor an error should repeat."""
# From asm/unistd_64.h and asm-generic/unistd.h: calls that change an owner or the user, and capset.
PRETENDED = {
    "x86_64": (0xC000003E, (92, 93, 94, 260, 105, 106, 113, 114, 116, 117, 119, 122, 123, 126)),
    "aarch64": (0xC00000B7, (54, 55, 143, 144, 145, 146, 147, 149, 151, 152, 159, 91)),
}
Line = Callable[[str], None]
Sender = Callable[[IO[bytes]], None]


@dataclass(frozen=True, slots=True)
class StepMount:
    kind: Literal["bind", "cache", "tmpfs"]
    target: str
    source: str = "/"
    layers: tuple[Path, ...] = ()
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class StepJob:
    action: Literal["run", "write", "read", "folder", "tool"]
    layers: Sequence[Path] = ()
    """Topmost first."""

    changes: Path | None = None
    """Has the empty folders `fs`, for the step's changes, and `work`, both of the namespace's root."""

    output: Path | None = None
    inputs: Sequence[Path] = ()
    argv: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)
    """Programs of here-documents, by name, in /dev/pipes."""

    user: str = ""
    cwd: str = "/"
    dest: str = ""
    owner: str = ""
    mode: str = ""
    many: bool = False
    """Whether the destination is a folder because of many sources."""

    sources: Sequence[str] = ()
    mounts: Sequence[StepMount] = ()
    network: Literal["host", "none"] = "none"
    max_bytes: int = 0
    """0 is no limit."""


@dataclass(frozen=True, slots=True)
class StepResult:
    exit_code: int
    last_lines: tuple[str, ...] = ()
    full: bool = False
    error: str = ""


class BuildNamespace:
    """The ids and the running steps of this user's builds. Its methods block; `cancel` may be called from another
    thread.
    """

    def __init__(self) -> None:
        self.ids = _ids()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._cancelled = False

    @property
    def owner(self) -> tuple[int, int]:
        """The host's user and group that are root in the namespace."""
        if self.ids["kind"] == "mapped":
            return int(self.ids["users"].split()[0]), int(self.ids["groups"].split()[0])
        return os.geteuid(), os.getegid()

    @property
    def keeps_owners(self) -> bool:
        return self.ids["kind"] != "single"

    def cancel(self) -> None:
        """End the running steps; every later one fails."""
        with self._lock:
            self._cancelled = True
            for process in self._running:
                process.kill()

    def _refuse_if_cancelled(self) -> None:
        if self._cancelled:
            raise ImageBuildError("the build was cancelled", hint="start it again")

    def make_folder(self, path: Path) -> Path:
        path.mkdir(parents=True, mode=0o755)
        if os.geteuid() == 0:
            os.chown(path, *self.owner)
        return path

    def remove(self, path: Path) -> None:
        """Remove a folder, whoever owns its files, also after `cancel`; files that cannot be removed stay."""
        if self.ids["kind"] == "subordinate" and path.is_dir():
            inside = [entry for entry in path.iterdir() if entry.is_dir() and not entry.is_symlink()]
            if inside:
                targets = [f"/tmp/in{number}" for number in range(len(inside))]  # noqa: S108  see step/overlay.py
                command = ["find", *targets, "-xdev", "-mindepth", "1", "-delete"]
                with suppress(ImageBuildError):
                    BuildNamespace().run(StepJob("tool", argv=command, inputs=inside))
        remove_tree(path)

    def run(
        self,
        job: StepJob,
        say: Line = lambda _line: None,
        *,
        data: Sender | StepJob | None = None,
    ) -> StepResult:
        """Do a step to its end. `say` gets the lines that it prints, in this thread.

        `data` is its input: a function that writes an archive, or another step that does.

        Raises:
            ImageBuildError: The step could not even begin.
        """
        feeder = _Feeder(self, data)
        try:
            process, report = self._start(job, feeder.stdin, subprocess.PIPE)
            try:
                with process:
                    feeder.start()
                    last = _pass_on(process.stdout, say)
            except BaseException:  # an interrupt, which the step must not outlive
                process.kill()
                os.close(report)
                raise
        finally:
            failed = feeder.finish()
            with self._lock:
                self._running = {one for one in self._running if one.poll() is None}
        found = _read_report(report, process.returncode, last)
        return found if not failed else StepResult(1, failed.last_lines, failed.full, failed.error)

    def stream(self, job: StepJob) -> "tuple[subprocess.Popen[bytes], int]":
        """Start a step whose output is an archive; return its process and the descriptor of its report."""
        return self._start(job, subprocess.DEVNULL, subprocess.PIPE, errors=subprocess.PIPE)

    def _start(
        self, job: StepJob, stdin: int | IO[bytes], stdout: int, errors: int = subprocess.STDOUT
    ) -> "tuple[subprocess.Popen[bytes], int]":
        document = os.memfd_create("job")
        pretend = _pretend_program() if self.ids["kind"] == "single" else ""
        told = asdict(job) | {"ids": self.ids, "pretend": pretend}
        os.write(document, json.dumps(told, default=str).encode())
        os.lseek(document, 0, os.SEEK_SET)
        report, ours = os.pipe()
        try:
            with self._lock:
                self._refuse_if_cancelled()
                process = subprocess.Popen(
                    [*alone("sandboxes.images.dockerfile.step.job"), str(document), str(ours)],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=errors,
                    env={"PATH": f"{PATH}:{os.environ.get('PATH', '')}", "LANG": "C.UTF-8"},
                    cwd="/",
                    pass_fds=[document, ours],
                    start_new_session=True,
                )
                self._running.add(process)
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(document)
            os.close(ours)
        return process, report


class _Feeder:
    def __init__(self, namespace: BuildNamespace, data: Sender | StepJob | None) -> None:
        self._other: tuple[subprocess.Popen[bytes], int] | None = None
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._pipe: IO[bytes] | None = None
        if isinstance(data, StepJob):
            self._other = namespace.stream(data)
            self._pipe = self._other[0].stdout
        elif data is not None:
            ours, theirs = os.pipe()
            self._pipe = os.fdopen(ours, "rb")
            self._thread = threading.Thread(target=self._send, args=(data, theirs), daemon=True)

    @property
    def stdin(self) -> int | IO[bytes]:
        return subprocess.DEVNULL if self._pipe is None else self._pipe

    def start(self) -> None:
        """Begin to send, once the step has its end of the pipe."""
        self._close()
        if self._thread is not None:
            self._thread.start()

    def _close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()

    def _send(self, data: Sender, descriptor: int) -> None:
        try:
            with os.fdopen(descriptor, "wb") as pipe:
                data(pipe)
        except BrokenPipeError:
            return  # the step has ended, and says why
        except BaseException as error:  # noqa: BLE001  raised again where the step is waited for
            self._problem = error

    def finish(self) -> StepResult | None:
        """Wait for the sender; return its failure, if any.

        Raises:
            BaseException: Whatever the function that writes the archive raised.
        """
        self._close()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        if self._problem is not None:
            raise self._problem
        if self._other is None:
            return None
        process, report = self._other
        with process:
            last = _pass_on(process.stderr, lambda _line: None)
            process.wait()
        found = _read_report(report, process.returncode, last)
        return found if found.exit_code or found.error else None


def _ids() -> dict[str, str]:
    if os.geteuid() == 0:
        first = ROOT_IDS if covered_by_this_namespace(range(ROOT_IDS, ROOT_IDS + COUNT)) else 0
        return {"kind": "mapped", "users": f"{first} {COUNT}", "groups": f"{first} {COUNT}"}
    user = os.geteuid()
    if has_subordinate_ids(user) and shutil.which("newuidmap") and shutil.which("newgidmap"):
        ranges = [subordinate_ids_of(user, file)[0].ids for file in (SUBUID, SUBGID)]
        users, groups = (f"{ids.start} {len(ids)}" for ids in ranges)
        return {"kind": "subordinate", "users": users, "groups": groups}
    return {"kind": "single", "users": "", "groups": ""}


def _pretend_program() -> str:
    """Return a classic BPF program, in hexadecimal digits, by which `PRETENDED` calls return 0."""
    machine, numbers = PRETENDED.get(os.uname().machine, (0, ()))
    load, equal, answer, allow, errno = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    count = len(numbers)
    program = [(load, 0, 0, 4), (equal, 0, count + 1, machine), (load, 0, 0, 0)]
    program += [(equal, count - at, 0, number) for at, number in enumerate(numbers)]
    program += [(answer, 0, 0, allow), (answer, 0, 0, errno)]
    return b"".join(struct.pack("=HBBI", *one) for one in program).hex()


def _pass_on(output: IO[bytes] | None, say: Line) -> tuple[str, ...]:
    last: deque[str] = deque(maxlen=LAST_LINES)
    for text in plain_lines(output):
        last.append(text)
        say(text)
    return tuple(last)


def plain_lines(output: IO[bytes] | None) -> Iterator[str]:
    """Yield lines that are not empty, without terminal escapes."""
    for raw in output or ():
        # A carriage return separates the states of a progress bar; only the last counts.
        if text := ESCAPES.sub("", raw.decode(errors="replace")).rstrip().rsplit("\r", 1)[-1]:
            yield text


def _read_report(report: int, exit_code: int, last: tuple[str, ...]) -> StepResult:
    with os.fdopen(report, "rb") as file:
        lines = file.read().splitlines()
    found: dict[str, Any] = {}
    for line in reversed(lines):
        with suppress(ValueError):
            found |= json.loads(line)
    if not found:
        hint = NAMESPACES_HINT if exit_code > 0 else "start the build again"
        message = f"a step of the build ended with {exit_code} before it could report"
        raise ImageBuildError(message, hint=hint, output="\n".join(last))
    if "error" in found and "unshare" in found["error"]:
        raise ImageBuildError(f"no namespace for the build: {found['error']}", hint=NAMESPACES_HINT)
    return StepResult(int(found.get("exit", 1)), last, bool(found.get("full")), str(found.get("error", "")))

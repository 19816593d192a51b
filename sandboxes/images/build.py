"""Making images with Apptainer; where they are kept is `images.py`'s business.

A build either leaves a complete image at its target or raises and leaves nothing there. The commands run
through spython's terminal helpers: its `Client` starts a program that is called "singularity" and found by
PATH, while this project uses the Apptainer that `find_apptainer` names.
"""

import os
import re
import stat
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from spython.utils import stream_command

from sandboxes.errors import ImageBuildError
from sandboxes.host.facts import read_host_facts
from sandboxes.host.subordinate_ids import subordinate_ids_command
from sandboxes.images.shared_folder import SharedFolder
from sandboxes.images.sources import Source

Progress = Callable[[str], None]
"""Called with one line at a time, in the thread that builds."""

COMPRESSION = "-comp zstd -Xcompression-level 3 -b 64K"
"""Arguments of mksquashfs, chosen by measurement: every start of a sandbox mounts the image anew and reads it
without a cache, so what a start costs is decompression. zstd is within a sixth of an uncompressed image's start
at a third of its size; gzip, the default, costs 1.4 times as much as this, and blocks of 1 MB 1.6 times."""

ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)")
"""Colours and other orders to a terminal, which neither a log nor an error should repeat."""

LAST_LINES = 15
TEMPORARY = "name another folder in APPTAINER_TMPDIR"
PASSWORDS = ("APPTAINER_DOCKER_PASSWORD", "SINGULARITY_DOCKER_PASSWORD", "DOCKER_PASSWORD")
HINTS = (
    (
        ("dial tcp", "no such host", "connection refused", "i/o timeout"),
        "the registry cannot be reached from here; pull the image elsewhere, and use its file or an archive of it",
    ),
    (
        (
            "authentication required",
            "UNAUTHORIZED",
            "401 Unauthorized",
            "403 Forbidden",
            "access to the resource is denied",
        ),
        "log in with `apptainer registry login`, or set APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD",
    ),
    (("MANIFEST_UNKNOWN", "NAME_UNKNOWN", "404 Not Found"), "the registry has no such image or tag"),
    (("http response to HTTPS client",), "this registry speaks no https: pass --no-https"),
    (("x509:",), "the registry's certificate is not trusted here: add its authority to the system's"),
    (("no child with platform", "does not match host"), "the image is for another kind of machine"),
    (
        ("no space left on device", "No space left"),
        "free space on the disk, or name another in APPTAINER_TMPDIR",
    ),
    (
        ("mmdebstrap: not found", "executable file not found"),
        "run scripts/install-apptainer as root, which installs what building needs",
    ),
    (
        ("Requesting capability set",),
        "root lacks a capability here, as in many containers, so Apptainer can run nothing in an image that it "
        "builds (`%post`, `Bootstrap: localimage`). Use `%setup`, --arg or --tree, or build on another machine",
    ),
    (
        ("fakeroot", "Cannot change ownership"),
        "building as an ordinary user needs subordinate ids; an administrator gives them with `{give_ids}`. Or use an "
        "image that another user has built: name its folder in ROLLOUT_IMAGES_DIR",
    ),
)
"""The commonest causes, by what Apptainer and the definitions say."""


class ImageBuilder(Protocol):
    """What the store needs of a program that makes images. All of it blocks: call it in a thread."""

    @property
    def version(self) -> str:
        """Changes when the same source would give another image."""

    def build(self, source: Source, target: Path, progress: Progress) -> None:
        """Write the image to `target`, or raise ImageBuildError."""


class ApptainerBuilder:
    """Builds with the host's Apptainer, which is looked up when it is first needed."""

    version = f"apptainer:{COMPRESSION}"

    def build(self, source: Source, target: Path, progress: Progress) -> None:
        facts = read_host_facts()
        # Without Apptainer's cache of layers, whose size nothing bounds.
        command = [str(facts.require_apptainer()), "build", "--force", "--disable-cache"]
        command += ["--mksquashfs-args", COMPRESSION, *source.flags()]
        if not facts.is_root:
            command.append("--fakeroot")
        what = f"making an image of the {source.kind} {source}"
        with _scratch().draft("build") as scratch:
            _run([*command, str(target), str(source)], what, progress, {"APPTAINER_TMPDIR": str(scratch)})


def _scratch() -> SharedFolder:
    """Where Apptainer unpacks what it builds, on a disk of this machine; what killed builders left there goes."""
    base = os.environ.get("APPTAINER_TMPDIR") or tempfile.gettempdir()
    folder = Path(base) / f"rollout-service-build-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ImageBuildError(f"{folder} cannot be made: {error.strerror}", hint=TEMPORARY) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ImageBuildError(f"{folder} is not a folder of this user", hint=TEMPORARY)
    shared = SharedFolder(folder)
    shared.remove_dead_drafts()
    return shared


def _run(command: Sequence[str], what: str, progress: Progress, variables: Mapping[str, str]) -> None:
    """Run it to its end, hand on its lines, and turn a failure into an error that quotes the last of them."""
    # A definition that installs Python packages uses this Python's pip if PATH's Python has none.
    given = {"ROLLOUT_PYTHON": os.environ.get("ROLLOUT_PYTHON", sys.executable), "PATH": _path(), **variables}
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        for line in _lines(["env", *(f"{name}={value}" for name, value in given.items()), *command]):
            last.append(line)
            progress(line)
    except subprocess.CalledProcessError as error:
        said = "\n".join(last)
        message = f"{what} failed with exit code {error.returncode}"
        raise ImageBuildError(message, hint=hint_for(said), output=said) from error
    except OSError as error:
        raise ImageBuildError(f"{what} failed: {error}", hint=hint_for(str(error))) from error


def _path() -> str:
    """Return PATH with the folders of administrators' programs, such as chroot, which users often lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _lines(command: Sequence[str]) -> Iterator[str]:
    # A carriage return separates the states of a progress bar, of which the last counts.
    for line in stream_command(list(command), output_type="both"):
        text = ESCAPES.sub("", line).rstrip().rsplit("\r", 1)[-1]
        if text:
            yield _without_passwords(text)


def _without_passwords(line: str) -> str:
    for name in PASSWORDS:
        if password := os.environ.get(name):
            line = line.replace(password, "[hidden]")
    return line


def hint_for(output: str) -> str:
    """What to do about a failure, by what the builder said."""
    for signs, hint in HINTS:
        if any(sign.lower() in output.lower() for sign in signs):
            return hint.format(give_ids=subordinate_ids_command())
    return "look for the cause in the builder's last lines"

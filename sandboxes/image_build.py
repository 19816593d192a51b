"""Building, pulling and inspecting images with Apptainer; where they are kept is `images.py`'s business.

A build either leaves a complete image at its target or raises and leaves nothing there. The commands run
through spython's terminal helpers: its `Client` starts a program that is called "singularity" and found by
PATH, while this project uses the Apptainer that `find_apptainer` names.
"""

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from spython.main.inspect import parse_labels
from spython.utils import run_command, stream_command

from sandboxes.errors import ImageBuildError, ImageError, ImageNotFoundError
from sandboxes.host import HostFacts, read_host_facts

Progress = Callable[[str], None]
"""Called with one line at a time, in the thread that builds."""

DEFINITIONS = Path(str(files("sandboxes") / "definitions"))
"""The definitions that this package brings; the file's stem is the image's name."""

COMPRESSION = "-comp zstd -Xcompression-level 3 -b 64K"
"""Arguments of mksquashfs, chosen by measurement: every start of a sandbox mounts the image anew and reads it
without a cache, so what a start costs is decompression. zstd is within a sixth of an uncompressed image's start
at a third of its size; gzip, the default, costs 1.4 times as much as this, and blocks of 1 MB 1.6 times."""

PROBE_SECONDS = 60.0
LAST_LINES = 15

PROBE = """
command -v bash >/dev/null && bash -c 'echo "bash=$BASH_VERSION"'
command -v python3 >/dev/null && python3 -c '
import importlib.metadata, platform
print("python=" + platform.python_version())
print("ipykernel=" + importlib.metadata.version("ipykernel"))' 2>/dev/null
:
"""


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What an image offers to the service; None is a program that it does not have."""

    path: Path
    size_bytes: int
    """Of the file; of all files of an unpacked image."""

    bash: str | None
    python: str | None
    ipykernel: str | None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[str, ...]:
        """What the service's sessions need and this image lacks. Without bash there is no session at all."""
        needed = {"bash": self.bash, "python3": self.python, "ipykernel": self.ipykernel}
        return tuple(name for name, version in needed.items() if version is None)


class ImageBuilder(Protocol):
    """What the store needs of a program that makes images. All of it blocks: call it in a thread."""

    @property
    def version(self) -> str:
        """Changes when the same definition would give another image."""

    def build(self, definition: Path, target: Path, arguments: Mapping[str, str], progress: Progress) -> None:
        """Write the image to `target`, or raise ImageBuildError."""

    def pull(self, reference: str, target: Path, progress: Progress) -> None:
        """Write the image of a registry to `target`, or raise ImageBuildError."""

    def inspect(self, image: Path) -> ImageInfo:
        """Say what is in the image, or raise ImageError."""


class ApptainerBuilder:
    """Builds with the host's Apptainer, which is looked up when it is first needed."""

    version = f"apptainer:{COMPRESSION}"

    def build(self, definition: Path, target: Path, arguments: Mapping[str, str], progress: Progress) -> None:
        facts, apptainer = _apptainer()
        command = [apptainer, "build", "--force", "--mksquashfs-args", COMPRESSION]
        if not facts.is_root:
            command.append("--fakeroot")
        for name, value in arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        _run([*command, str(target), str(definition)], f"building {definition}", progress)

    def pull(self, reference: str, target: Path, progress: Progress) -> None:
        _, apptainer = _apptainer()
        _run([apptainer, "pull", "--force", str(target), reference], f"pulling {reference}", progress)

    def inspect(self, image: Path) -> ImageInfo:
        facts, apptainer = _apptainer()
        found = dict(line.split("=", 1) for line in _probe(facts, apptainer, image) if "=" in line)
        return ImageInfo(
            path=image,
            size_bytes=_size(image),
            bash=found.get("bash"),
            python=found.get("python"),
            ipykernel=found.get("ipykernel"),
            labels=_labels(apptainer, image),
        )


def packaged_definition(name: str) -> Path:
    """The definition that this package brings for `name`.

    Raises:
        ImageNotFoundError: it brings none.
    """
    path = DEFINITIONS / f"{name}.def"
    if path.is_file():
        return path
    known = ", ".join(packaged_names())
    raise ImageNotFoundError(
        f"there is no built-in definition {name!r}; there are: {known}", hint="name a definition file"
    )


def packaged_names() -> list[str]:
    """The images that this package can build, by name."""
    return sorted(path.stem for path in DEFINITIONS.glob("*.def"))


def _apptainer() -> tuple[HostFacts, str]:
    facts = read_host_facts()
    return facts, str(facts.require_apptainer())


def _run(command: Sequence[str], what: str, progress: Progress) -> None:
    """Run it to its end, hand on its lines, and turn a failure into an error that quotes the last of them."""
    # A definition that installs Python packages uses this Python's pip if PATH's Python has none.
    python = os.environ.get("ROLLOUT_PYTHON", sys.executable)
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        for line in _lines(["env", f"ROLLOUT_PYTHON={python}", *command]):
            last.append(line)
            progress(line)
    except (subprocess.CalledProcessError, OSError) as error:
        raise ImageBuildError(
            f"{what} failed: {error}\n" + "\n".join(last), hint=_hint("\n".join(last))
        ) from error


def _lines(command: Sequence[str]) -> Iterator[str]:
    # A carriage return separates the states of a progress bar, of which the last counts.
    for line in stream_command(list(command), output_type="both"):
        text = line.rstrip().rsplit("\r", 1)[-1]
        if text:
            yield text


def _hint(output: str) -> str:
    """The commonest causes, by what Apptainer and the definitions say."""
    if "dial tcp" in output or "no such host" in output or "connection refused" in output:
        return "the registry cannot be reached from here; pull the image elsewhere and name the file"
    if "mmdebstrap: not found" in output or "executable file not found" in output:
        return "run scripts/install-apptainer as root, which installs what building needs"
    if "fakeroot" in output or "Cannot change ownership" in output:
        return "building as an ordinary user needs lines in /etc/subuid and /etc/subgid; or build as root"
    return "the lines above are the builder's own"


def _probe(facts: HostFacts, apptainer: str, image: Path) -> list[str]:
    """Ask the image's own programs, confined as in a sandbox: the image may be hostile."""
    command = [apptainer, "--quiet", "exec", "--containall", "--cleanenv", "--net", "--network", "none"]
    command += ["--no-privs"] if facts.needs_no_privs else []
    try:
        answer = subprocess.run(
            [*command, str(image), "/bin/sh", "-c", PROBE],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise ImageError(f"{image} did not answer within {PROBE_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise ImageError(f"{image} cannot be started: {error.stderr.strip()}") from error
    return answer.stdout.splitlines()


def _labels(apptainer: str, image: Path) -> dict[str, str]:
    answer = run_command([apptainer, "--quiet", "inspect", "--json", "--labels", str(image)], quiet=True)
    if answer["return_code"] != 0:
        raise ImageError(f"{image} is not an image: {''.join(answer['message']).strip()}")
    data = json.loads(answer["message"][0])["data"]
    return {str(name): str(value) for name, value in parse_labels(data)["attributes"]["labels"].items()}


def _size(image: Path) -> int:
    if image.is_file():
        return image.stat().st_size
    return sum(path.lstat().st_size for path in image.rglob("*") if not path.is_dir())

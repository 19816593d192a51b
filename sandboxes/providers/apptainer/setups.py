"""The containers that Apptainer made of the first sandboxes of a kind, from which the launcher makes the next ones.

Two sandboxes are of one kind if Apptainer gets the same arguments for the same image, apart from the sandbox's own
folder and id. The first reports, before anything else runs inside, its environment, its mounts, and Apptainer's files
in /etc. If the launcher would not mount the same, Apptainer starts the others too.

What an image reports falsely changes sandboxes of that image alone, since all rights are given up before. A sandbox
that begins with files of another reports nothing: its bash may be one that an agent wrote.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import structlog

from sandboxes.host.processes import MARKER
from sandboxes.providers.apptainer.launch.container import DEVICES, ContainerCommand
from sandboxes.providers.base import BASH
from sandboxes.reclaim.run_folders import RunFolder

log = structlog.get_logger(__name__)

MAX_SETUPS = 256
MAX_REPORT_BYTES = 64 * 1024
FOLDER, ID = "\0folder\0", "\0id\0"
"""Stand for a sandbox's folder and id."""

HOST_FILES = ("/etc/resolv.conf", "/etc/passwd", "/etc/group")
"""Apptainer makes them inside, from those of the host and the image."""
MOUNTS = frozenset(("/", "/proc", "/dev", *(f"/dev/{name}" for name in ("shm", "mqueue", *DEVICES))))
BEGIN, END = "rollout-setup-begin", "rollout-setup-end"
REPORT = (
    'report() { local -a text=(); mapfile -d \'\' text <"$1"; printf \'%s\\0\' "${#text[@]}" "${text[@]}"; }; '
    f"{{ printf '\\0{BEGIN}\\0'; report /proc/self/environ; report /proc/self/mountinfo; "
    f"for file in {' '.join(HOST_FILES)}; do report \"$file\"; done; printf '{END}\\0'; }} 2>/dev/null; "
    "unset -f report; "
)
"""Print, for each file, the number of its texts, and these, each ended by NUL."""


@dataclass(frozen=True, slots=True)
class ContainerSetup:
    environ: Mapping[str, str]
    files: Mapping[str, str]

    def variables(self, folder: RunFolder, image: str) -> dict[str, str]:
        inside = {
            name: value.replace(FOLDER, str(folder.path)).replace(ID, folder.id) for name, value in self.environ.items()
        }
        return {
            "LAUNCH_DIRECT": image,
            "LAUNCH_ORIGINAL": BASH,
            **{f"INSIDE_{name}": value for name, value in inside.items()},
            **{f"FILE_{path}": content for path, content in self.files.items()},
        }


class ContainerSetups:
    """Has the kinds that were started last; a kind that the launcher cannot make is None."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[str, ...], ContainerSetup | None] = OrderedDict()

    @staticmethod
    def key(command: Sequence[str], image: Path, folder: RunFolder) -> tuple[str, ...]:
        """Return the kind by Apptainer's command and the state of the files that it uses."""
        return (
            *(_without_names(argument, folder) for argument in command),
            *(_identity(path) for path in (image, *map(Path, HOST_FILES))),
        )

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def get(self, key: tuple[str, ...] | None) -> ContainerSetup | None:
        """Return None if Apptainer must start it."""
        return None if key is None else self._found.get(key)

    def learn(self, key: tuple[str, ...], folder: RunFolder, command: ContainerCommand) -> None:
        with folder.log.open("rb") as file:
            report = file.read(MAX_REPORT_BYTES)
        try:
            self._found[key] = _parse(report, folder, {target for _, target, _ in command.binds()})
        except (ValueError, IndexError) as error:
            image = key[-1 - len(HOST_FILES)]
            log.info("each sandbox of this kind runs Apptainer", reason=str(error), image=image)
            self._found[key] = None
        while len(self._found) > MAX_SETUPS:
            self._found.popitem(last=False)


def _identity(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return f"{path} -"
    return f"{path} {found.st_dev}:{found.st_ino} {found.st_mtime_ns}"


def _parse(report: bytes, folder: RunFolder, mounted: set[str]) -> ContainerSetup:
    """
    Raises:
        ValueError, IndexError: There is no report, or the launcher would make another container.
    """
    texts = report.decode("utf-8", "surrogateescape").split("\0")
    if BEGIN not in texts or END not in texts:
        raise ValueError("no report, for which the image needs bash 4.4")
    environ, mounts, *files = _parts(texts[texts.index(BEGIN) + 1 : texts.index(END)])
    lines = "".join(mounts).splitlines()
    points = {line.split(" ")[4] for line in lines}
    if not any(line.split(" ")[4] == "/" and " - overlay " in line for line in lines):
        raise ValueError("its root is not the kernel's overlay")
    made = {path: "".join(content) for path, content in zip(HOST_FILES, files, strict=True) if path in points}
    if other := points ^ {*MOUNTS, *made, *mounted}:
        raise ValueError(f"other mounts: {', '.join(sorted(other))}")
    variables = dict(entry.partition("=")[::2] for entry in environ)
    if variables.get(MARKER) != folder.id or "" in variables:
        raise ValueError("the report is not that of this sandbox")
    return ContainerSetup({name: _without_names(value, folder) for name, value in variables.items()}, made)


def _without_names(text: str, folder: RunFolder) -> str:
    return text.replace(str(folder.path), FOLDER).replace(folder.id, ID)


def _parts(texts: Sequence[str]) -> list[list[str]]:
    """
    Raises:
        ValueError: It is not a report.
    """
    found: list[list[str]] = []
    rest = iter(texts)
    for count in rest:
        found.append(list(islice(rest, int(count))))
        if len(found[-1]) != int(count):
            raise ValueError("the report is incomplete")
    if len(found) != 2 + len(HOST_FILES):
        raise ValueError("the report is incomplete")
    return found

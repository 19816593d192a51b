"""Build images with Apptainer; `store.py` decides where they are kept.

A build either leaves a complete image at its target, or raises and leaves nothing there.
"""

import os
import secrets
import stat
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sandboxes.config import default_cache
from sandboxes.errors import ImageBuildError
from sandboxes.host.facts import read_host_facts
from sandboxes.host.subordinate_ids import subordinate_ids_command
from sandboxes.images.archives import read_archive, single_image
from sandboxes.images.dockerfile.context import BuildContext
from sandboxes.images.dockerfile.executor import PlanExecutor
from sandboxes.images.dockerfile.layer_builder import BuildOptions
from sandboxes.images.dockerfile.layers import LayerStore
from sandboxes.images.dockerfile.namespace import LAST_LINES, BuildNamespace, plain_lines
from sandboxes.images.shared_folder import SharedFolder
from sandboxes.images.sources import ArchiveSource, Definition, DockerfileSource, Source
from sandboxes.images.squashfs import COMPRESSION, offset

Progress = Callable[[str], None]

TEMPORARY = "set APPTAINER_TMPDIR to another folder"
PASSWORDS = ("APPTAINER_DOCKER_PASSWORD", "SINGULARITY_DOCKER_PASSWORD", "DOCKER_PASSWORD")
HINTS = (
    (
        ("dial tcp", "no such host", "connection refused", "i/o timeout"),
        "the registry cannot be reached from here; pull the image on another machine, and use its file or an archive",
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
    (
        ("MANIFEST_UNKNOWN", "NAME_UNKNOWN", "404 Not Found"),
        "the registry has no such image or tag; check the spelling",
    ),
    (("http response to HTTPS client",), "this registry does not use https: pass --no-https"),
    (
        ("x509:",),
        "the registry's certificate is not trusted here: add its authority to the system's certificates",
    ),
    (
        ("no child with platform", "does not match host"),
        "the image is for another architecture; choose one for this machine",
    ),
    (
        ("no space left on device", "No space left"),
        "free space on the disk, or set APPTAINER_TMPDIR to a folder on another",
    ),
    (
        ("mmdebstrap: not found", "executable file not found"),
        "run scripts/install-apptainer as root, which installs the programs that building needs",
    ),
    (
        ("Requesting capability set",),
        "root lacks a capability here, as in many containers, so Apptainer cannot run programs in an image that it "
        "builds (`%post`, `Bootstrap: localimage`). Use `%setup`, --arg or --tree, or build on another machine",
    ),
    (
        ("fakeroot", "Cannot change ownership"),
        "building as an ordinary user needs subordinate ids; an administrator can add them with `{give_ids}`. Or use "
        "an image that another user has built: set ROLLOUT_IMAGES_DIR to its folder",
    ),
)


class ApptainerBuilder:
    """Builds with the host's Apptainer, found anew for each build. Its methods block."""

    version = f"apptainer:{COMPRESSION}"
    """Changes when the same source would give another image."""

    def __init__(self, layers_dir: Path | None = None) -> None:
        """`layers_dir` has the layers of Dockerfiles."""
        self._layers_dir = layers_dir
        self.namespace = BuildNamespace()

    @property
    def layers(self) -> LayerStore:
        return LayerStore(self._layers_dir or default_layers_dir(), self.namespace)

    def build(self, source: Source, target: Path, progress: Progress) -> None:
        """
        Raises:
            ImageBuildError: The build failed.
        """
        facts = read_host_facts()
        if isinstance(source, DockerfileSource):
            self._carry_out(source, target, facts.require_apptainer(), progress)
            return
        # Without Apptainer's cache of layers, whose size is unbounded.
        command = [str(facts.require_apptainer()), "build", "--force", "--disable-cache"]
        command += ["--mksquashfs-args", COMPRESSION]
        if not facts.is_root:
            command.append("--fakeroot")
        what = f"building an image from the {source.kind} {source}"
        variables = _begin(source, facts.require_apptainer())
        with _scratch().draft("build") as scratch:
            if isinstance(source, ArchiveSource):
                archive = read_archive(source.path)
                told = [f"{archive.kind}:{single_image(archive, source.tag, scratch)}"]
            else:
                told = [str(source)]
                command += source.flags()
            _run(
                [*command, str(target), *told],
                what,
                progress,
                {**variables, "APPTAINER_TMPDIR": str(scratch)},
            )

    def _carry_out(self, source: DockerfileSource, target: Path, apptainer: Path, progress: Progress) -> None:
        plan = source.plan()
        if plan.unused:
            progress(f"no ARG declares the build argument {', '.join(plan.unused)}")
        options = BuildOptions(source.network, source.max_bytes, "" if source.cached else secrets.token_hex(8))
        context = BuildContext(source.context, source.path)
        PlanExecutor(plan, context, source.bases, self.layers, apptainer, progress, options).build(target)


def _begin(source: Source, apptainer: Path) -> dict[str, str]:
    if not isinstance(source, Definition) or source.begin is None:
        return {}
    return {"ROLLOUT_BEGIN": str(source.begin), "ROLLOUT_BEGIN_OFFSET": offset(apptainer, source.begin)}


def default_layers_dir() -> Path:
    return default_cache() / "layers"


def _scratch() -> SharedFolder:
    """Return the local folder where Apptainer unpacks its builds, after removing leftovers of killed builds."""
    base = os.environ.get("APPTAINER_TMPDIR") or tempfile.gettempdir()
    folder = Path(base) / f"rollout-service-build-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ImageBuildError(f"cannot create {folder}: {error.strerror}", hint=TEMPORARY) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ImageBuildError(f"{folder} is not a folder that this user owns", hint=TEMPORARY)
    shared = SharedFolder(folder)
    shared.remove_dead_drafts()
    return shared


def _run(command: Sequence[str], what: str, progress: Progress, variables: Mapping[str, str]) -> None:
    """Run a command and pass on its lines; an error quotes the last of them."""
    # A definition that installs Python packages uses this Python's pip if the Python on PATH has none.
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
    """Add the folders of administrators' programs, such as chroot, which users' PATH often lacks."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _lines(command: Sequence[str]) -> Iterator[str]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        yield from map(_without_passwords, plain_lines(process.stdout))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _without_passwords(line: str) -> str:
    for name in PASSWORDS:
        if password := os.environ.get(name):
            line = line.replace(password, "[hidden]")
    return line


def hint_for(output: str) -> str:
    for signs, hint in HINTS:
        if any(sign.lower() in output.lower() for sign in signs):
            return hint.format(give_ids=subordinate_ids_command())
    return "look for the cause in the builder's last lines"

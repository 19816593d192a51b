"""Puts layers on stages, one for each step that changes files, then packs them with one for Apptainer and sandboxes.

A layer's key is a hash of its parent's key, the instruction, the variables that it sees, and the content of the files
that it copies. Whatever fails is named with file, line and instruction.
"""

import json
import platform
import shlex
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import IO, Literal

from sandboxes.errors import ImageBuildError
from sandboxes.images import squashfs
from sandboxes.images.dockerfile.layers import LayerStore, make_key
from sandboxes.images.dockerfile.namespace import Line, Sender, StepJob, StepResult
from sandboxes.images.dockerfile.parser import Instruction, StageState
from sandboxes.images.tree import ImageTree


@dataclass(frozen=True, slots=True)
class BuildOptions:
    network: Literal["host", "none"] = "host"
    max_bytes: int | None = None
    """The disk use that an image may have, its base included."""

    fresh: str = ""
    """Unique to this build, to use no layer of another; "" uses them."""


class LayerBuilder:
    def __init__(self, file: str, layers: LayerStore, say: Line, options: BuildOptions) -> None:
        self.layers = layers
        self.namespace = layers.namespace
        self.say = say
        self.options = options
        self._file = file

    def write(self, state: StageState, one: Instruction, job: StepJob, content: str, data: Sender | StepJob) -> None:
        """Add a layer of the files in `data`; `content` identifies them."""
        parts = (job.dest, job.cwd, job.owner, job.mode, job.many, content)
        self.do(state, one, make_key(state.key, one.keyword, *parts), job, data)

    def do(
        self,
        state: StageState,
        one: Instruction,
        key: str,
        job: StepJob,
        data: Sender | StepJob | None = None,
    ) -> None:
        most = self.options.max_bytes

        def fill(changes: Path) -> StepResult:
            left = 0 if most is None else max(1, most - state.size_bytes)
            return self.namespace.run(replace(job, changes=changes, max_bytes=left), self.say, data=data)

        self.add(state, one, key, fill)

    def add(self, state: StageState, one: Instruction, key: str, fill: Callable[[Path], StepResult]) -> None:
        """Put a layer on a stage, and make it if it is not there.

        Raises:
            ImageBuildError: The step failed, or the image is too large.
        """
        for below in state.layers:
            self.layers.find(below.key)  # a long build goes on to use them
        layer, what = self.layers.find(key), f"{self.where(one)}: {one}"
        if one.keyword != "FROM":
            self.say(what if layer is None else f"{what} (unchanged)")
        if layer is None:

            def checked(changes: Path) -> None:
                result = fill(changes)
                if result.full:
                    raise self._too_large(one)
                if result.exit_code or result.error:
                    raise self.failed(one, result)

            layer = self.layers.make(key, str(one), checked, lambda: self.say(f"{what} (waiting for another build)"))
        state.key, state.layers = key, (layer, *state.layers)
        if self.options.max_bytes is not None and state.size_bytes > self.options.max_bytes:
            raise self._too_large(one)

    def where(self, one: Instruction) -> str:
        return f"{self._file}:{one.line}"

    def failed(self, one: Instruction, result: StepResult) -> ImageBuildError:
        how = result.error or f"failed with exit code {result.exit_code}"
        if result.exit_code < 0:
            how = result.error or f"was ended by signal {-result.exit_code}"
        return ImageBuildError(
            f"{self.where(one)}: {one}: {how}",
            hint="look for the cause in the step's last lines" if result.last_lines else "",
            output="\n".join(result.last_lines),
        )

    def _too_large(self, one: Instruction) -> ImageBuildError:
        most = (self.options.max_bytes or 0) / 1e9
        return ImageBuildError(
            f"{self.where(one)}: {one}: the image takes more than {most:g} GB",
            hint="raise --max-gb, or let the same step remove what it needs only for itself",
        )


ARCHITECTURES = {"x86_64": "2", "aarch64": "4"}

ENVIRONMENT = ".singularity.d/env/90-environment.sh"
FOLDERS = {
    "dev": 0o755,
    "proc": 0o755,
    "sys": 0o755,
    "etc": 0o755,
    "root": 0o700,
    "tmp": 0o1777,
    "var/tmp": 0o1777,
}
"""Folders that a sandbox needs to start and an image from scratch may lack."""


def add_settings(builder: LayerBuilder, state: StageState, origin: Instruction) -> None:
    files = {ENVIRONMENT: _environment(state), ".singularity.d/labels.json": _labels(state)}
    if start := (*state.entrypoint, *state.command):
        files[".singularity.d/runscript"] = f'#!/bin/sh\nexec {shlex.join(start)} "$@"\n'
    missing = [name for name in FOLDERS if not any((path / name).is_dir() for path in state.files)]
    job = StepJob("write", state.files, dest="/", many=True)
    end = replace(origin, text="the image's settings", flags=())
    content = make_key(files, missing)
    builder.write(state, end, job, content, lambda pipe: _send_settings(files, missing, pipe))


def _environment(state: StageState) -> str:
    changed = {name: value for name, value in state.env.items() if state.declared.get(name) != value}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in changed.items())
    return (_read(state, ENVIRONMENT) or "#!/bin/sh\n").rstrip("\n") + f"\n{exports}"


def _labels(state: StageState) -> str:
    labels = state.labels | {"docker.workdir": state.workdir, "docker.user": state.user or "root"}
    for name, words in (("entrypoint", state.entrypoint), ("cmd", state.command)):
        labels |= {f"docker.{name}": json.dumps(words)} if words else {}
    return json.dumps(labels, indent=1)


def _read(state: StageState, path: str) -> str | None:
    for folder in state.files:
        found = ImageTree(folder).read(f"/{path}")
        if found is not None:
            return found.decode(errors="replace")
    return None


def _send_settings(files: Mapping[str, str], folders: list[str], pipe: IO[bytes]) -> None:
    with tarfile.open(fileobj=pipe, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name in folders:
            member = tarfile.TarInfo(f"d/{name}")
            member.type, member.mode = tarfile.DIRTYPE, FOLDERS[name]
            archive.addfile(member)
        for name, text in files.items():
            member = tarfile.TarInfo(f"d/{name}")
            data = text.encode(errors="surrogateescape")
            member.mode, member.size = 0o644 if name.endswith(".json") else 0o755, len(data)
            archive.addfile(member, BytesIO(data))


def pack(builder: LayerBuilder, apptainer: Path, state: StageState, origin: Instruction, target: Path) -> None:
    """Write the image file; an error names `origin`.

    Raises:
        ImageError: The image cannot be packed.
    """
    builder.say("packing the image")
    with builder.layers.scratch().draft("pack") as draft:
        output = builder.namespace.make_folder(draft / "out")
        options = [*squashfs.COMPRESSION.split(), "-noappend", "-quiet", "-no-progress", "-no-xattrs"]
        argv = ["mksquashfs", "/tmp/root", "/tmp/out/fs", *options]  # noqa: S108  see step/overlay.py
        result = builder.namespace.run(StepJob("tool", state.files, output=output, argv=argv), builder.say)
        if result.exit_code or result.error:
            raise builder.failed(origin, result)
        partition = ["--datatype", "4", "--parttype", "2", "--partfs", "1"]
        partition += ["--partarch", ARCHITECTURES.get(platform.machine(), "2"), "--groupid", "1"]
        for command in (["new", str(target)], ["add", *partition, str(target), str(output / "fs")]):
            squashfs.run([str(apptainer), "sif", *command])
        target.chmod(0o755)

"""Ends a build: a last layer has what Apptainer and sandboxes read, and all layers are packed into an image file."""

import json
import platform
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import IO

from sandboxes.images import squashfs
from sandboxes.images.dockerfile.layer_builder import LayerBuilder
from sandboxes.images.dockerfile.layers import make_key
from sandboxes.images.dockerfile.namespace import StepJob
from sandboxes.images.dockerfile.parser import Instruction
from sandboxes.images.dockerfile.stages import StageState
from sandboxes.images.tree import ImageTree

ARCHITECTURES = {"x86_64": "2", "aarch64": "4"}
"""How a SIF names machines."""

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
"""What a sandbox needs to start, and an image from scratch may lack."""


def add_settings(builder: LayerBuilder, state: StageState, origin: Instruction) -> None:
    """Add a layer with what Apptainer and sandboxes read: variables, labels and the start command."""
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


def pack(
    builder: LayerBuilder, apptainer: Path, state: StageState, origin: Instruction, target: Path
) -> None:
    """Write the image file of a state's layers; `origin` is named if that fails.

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

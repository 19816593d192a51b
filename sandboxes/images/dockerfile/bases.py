"""Begins stages with a base: its files become a layer, and its settings are those that the stage begins with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandboxes.images import squashfs
from sandboxes.images.dockerfile.context import send_tree
from sandboxes.images.dockerfile.layer_builder import LayerBuilder
from sandboxes.images.dockerfile.layers import make_key
from sandboxes.images.dockerfile.namespace import PATH, StepJob, StepResult
from sandboxes.images.dockerfile.parser import Instruction
from sandboxes.images.dockerfile.stages import StageState
from sandboxes.images.facts import read_environment, read_labels
from sandboxes.images.tree import ImageTree

UNPACK = ("-quiet", "-no-progress", "-no-xattrs", "-no-exit-code", "-force")


def base_state(builder: LayerBuilder, apptainer: Path, base: Path, origin: Instruction) -> StageState:
    """Return the state of a stage that has nothing but a base, an image file or folder.

    Args:
        builder: makes the layer.
        apptainer: the program that reads image files.
        base: its path.
        origin: the instruction that asks for it.

    Raises:
        ImageBuildError: The base cannot be unpacked, or is too large.
        ImageError: The base cannot be read.
    """
    path = base.resolve()
    found = path.stat()
    owners, fresh = builder.namespace.keeps_owners, builder.options.fresh
    key = make_key("base", str(path), found.st_size, found.st_mtime_ns, owners, fresh)
    state = StageState(key)
    builder.add(state, origin, key, lambda changes: _unpack(builder, apptainer, path, changes, origin))
    tree = ImageTree(state.files[0])
    descriptor = squashfs.read_descriptor(apptainer, path) if path.is_file() else {}
    state.declared = {"PATH": PATH} | read_environment(tree)
    state.env, state.labels = dict(state.declared), read_labels(tree)
    state.workdir = descriptor.get("WorkingDir") or state.labels.get("docker.workdir") or "/"
    state.user = descriptor.get("User") or state.labels.get("docker.user") or ""
    state.entrypoint = _strings(descriptor.get("Entrypoint") or state.labels.get("docker.entrypoint"))
    state.command = _strings(descriptor.get("Cmd") or state.labels.get("docker.cmd"))
    return state


def _unpack(
    builder: LayerBuilder, apptainer: Path, image: Path, changes: Path, origin: Instruction
) -> StepResult:
    if image.is_dir():
        job = StepJob("write", changes=changes, dest="/", many=True)
        return builder.namespace.run(job, builder.say, data=lambda pipe: send_tree(image, pipe))
    where = squashfs.offset(apptainer, image)
    argv = ["unsquashfs", *UNPACK, "-offset", where, "-dest", "/tmp/out", "/tmp/in0"]  # noqa: S108  see step/overlay.py
    # It complains of devices, which nobody can make here, and which every sandbox has of its own.
    job = StepJob("tool", output=changes / "fs", inputs=[image], argv=argv)
    result = builder.namespace.run(job)
    if not any((changes / "fs").iterdir()):
        raise builder.failed(origin, replace(result, exit_code=result.exit_code or 1))
    return replace(result, exit_code=0)


def _strings(value: Any) -> tuple[str, ...]:
    """Return a list of strings of a descriptor, or of a label, where it is JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return ()
    return tuple(map(str, found)) if isinstance(found, list) else ()

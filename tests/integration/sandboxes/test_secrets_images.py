"""No image that is built, no layer, and no output of a build has a secret of the host that it was built on."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from sandboxes.host.facts import find_apptainer
from sandboxes.images import squashfs
from sandboxes.images.store import ImageStore

pytestmark = [
    pytest.mark.apptainer,
    pytest.mark.slow(seconds=60),
    pytest.mark.timeout(300),
    pytest.mark.extended("sandboxes/images/"),
]
SECRETS = {
    "GRADER_KEY": "grader-47e1-planted",
    "ROLLOUT_KEY": "server-5c0d-planted",
    "APPTAINERENV_AGENT_KEY": "agent-93b2-planted",
    "SINGULARITYENV_AGENT_KEY": "agent-60d8-planted",
    "APPTAINER_DOCKER_PASSWORD": "registry-82af-planted",
}
"""Variables of the process that builds, as an operator sets them for the service."""
FILE = "file-1d7b-planted"
"""A secret in a file beside the folder that an image is built from."""
SHOWN = "argument-of-the-build"
"""A text that the images do have, which shows that the search finds what there is."""
DOCKERFILE = """
FROM base
ARG SHOWN GRADER_KEY
ENV SHOWN=$SHOWN
RUN { env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; cat ../keys/* /keys/*; } >/seen 2>&1; env
RUN echo "${GRADER_KEY-}" >/key
COPY . /copied
"""
DEFINITION = """
Bootstrap: scratch
%arguments
    SHOWN=
%setup
    mkdir -p "$APPTAINER_ROOTFS/bin" "$APPTAINER_ROOTFS/etc"
    echo "{{ SHOWN }}" >"$APPTAINER_ROOTFS/seen"
%environment
    export SHOWN="{{ SHOWN }}"
"""


def build(folder: Path, *arguments: str) -> str:
    """Build with the command, as an operator does who has secrets for the service; return what it printed."""
    places = {"ROLLOUT_IMAGES_DIR": str(folder / "images"), "ROLLOUT_LAYERS_DIR": str(folder / "layers")}
    command = [sys.executable, "-m", "rollout_service.cli", "image", "build", *arguments]
    environ = {**os.environ, **SECRETS, **places}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}"


def leaks(outputs: Mapping[str, bytes]) -> set[tuple[str, str]]:
    """Return each output that has a secret, and the secret."""
    return {
        (name, secret)
        for name, output in outputs.items()
        for secret in (*SECRETS.values(), FILE)
        if secret.encode() in output
    }


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder, and those in its images, by their paths; links are names too."""
    found: dict[str, bytes] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path)] = os.fsencode(path.readlink())
        elif path.is_file():
            found[str(path)] = path.read_bytes()
    for image in folder.rglob("*.sif"):
        if not image.is_symlink():
            tree = folder.parent / f"tree of {image.name}"
            squashfs.unpack(find_apptainer(), image, tree)
            found |= contents(tree)
    return found


@pytest.mark.parametrize("kind", ["Dockerfile", "Dockerfile that fails", "definition"])
def test_an_image_has_no_secret_of_the_host_that_built_it(kind, tmp_path):
    made, source, keys = tmp_path / "made", tmp_path / "source", tmp_path / "keys"
    source.mkdir()
    keys.mkdir()
    (keys / "key").write_text(FILE)
    (source / "Dockerfile").write_text(DOCKERFILE + ("RUN env && false\n" if "fails" in kind else ""))
    (source / "tiny.def").write_text(DEFINITION)
    if kind == "definition":
        said = build(made, "tiny", "--definition", str(source / "tiny.def"), "--arg", f"SHOWN={SHOWN}")
    else:
        base = (ImageStore().root / "base.sif").resolve()
        said = build(made, str(source), "--base", f"base={base}", "--build-arg", f"SHOWN={SHOWN}")
    found = contents(made) | {"printed": said.encode()}
    assert leaks(found) == set()
    shown = [name for name, content in found.items() if SHOWN.encode() in content]
    assert any(name.endswith("/seen") for name in shown), said
    assert "printed" in shown

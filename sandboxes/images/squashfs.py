"""The file system of an image file, unpacked by squashfs-tools: nothing of the image is run or mounted."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sandboxes.errors import ImageError

UNPACK_SECONDS = 3600.0
# Not by `apptainer build`, which as root asks for capabilities that containers and jobs often lack. What an ordinary
# user cannot make, device files, is no failure: Apptainer brings a /dev of its own.
FLAGS = ("-quiet", "-no-progress", "-no-xattrs", "-no-exit-code")


def unpack(apptainer: Path, image: Path, target: Path, *, only: Sequence[str] = ()) -> None:
    """Make the folder `target` with the files of an image file, all of them or those below some paths.

    Files belong to whom they do in the image where this process is root. It blocks.

    Raises:
        ImageError: it cannot be unpacked; the message is Apptainer's or that of unsquashfs.
    """
    inside = [path.strip("/") for path in only]
    run(["unsquashfs", *FLAGS, "-o", _offset(apptainer, image), "-d", str(target), str(image), *inside])


def _offset(apptainer: Path, image: Path) -> str:
    """Where the file system begins in the image file."""
    listing = run([str(apptainer), "sif", "list", str(image)])
    found = re.search(r"\|(\d+)-\d+\s*\|FS \(Squashfs/", listing)
    if found is None:
        raise ImageError(f"{image} holds no squashfs", hint="set sandbox.unpack to false")
    return found[1]


def run(command: list[str]) -> str:
    """What a program of the unpacking says.

    Raises:
        ImageError: it failed.
    """
    try:
        result = subprocess.run(command, check=True, capture_output=True, timeout=UNPACK_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        raise ImageError(
            f"the image could not be unpacked: {said.decode(errors='replace').strip() or error}",
            hint="free disk space, install squashfs-tools, or set sandbox.unpack to false",
        ) from error
    return result.stdout.decode(errors="replace")

"""Unpacks the file system of an image file with squashfs-tools; nothing of the image is run or mounted."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sandboxes.errors import ImageError

UNPACK_SECONDS = 3600.0
# Not with `apptainer build`, which as root asks for capabilities that containers and jobs often lack. An ordinary user
# cannot create device files; that is not a failure, because Apptainer has its own /dev.
FLAGS = ("-quiet", "-no-progress", "-no-xattrs", "-no-exit-code")


def unpack(apptainer: Path, image: Path, target: Path, *, only: Sequence[str] = ()) -> None:
    """Create the folder `target` with the files of an image file: all of them, or those below the paths in `only`.

    If this process is root, files keep the owners that they have in the image. It blocks.

    Raises:
        ImageError: The image cannot be unpacked; the message is that of Apptainer or unsquashfs.
    """
    inside = [path.strip("/") for path in only]
    run(["unsquashfs", *FLAGS, "-o", _offset(apptainer, image), "-d", str(target), str(image), *inside])


def _offset(apptainer: Path, image: Path) -> str:
    """Return where the file system begins in the image file."""
    listing = run([str(apptainer), "sif", "list", str(image)])
    found = re.search(r"\|(\d+)-\d+\s*\|FS \(Squashfs/", listing)
    if found is None:
        raise ImageError(f"{image} contains no squashfs file system", hint="set sandbox.unpack to false")
    return found[1]


def run(command: list[str]) -> str:
    """Run a program and return its output.

    Raises:
        ImageError: The program failed.
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

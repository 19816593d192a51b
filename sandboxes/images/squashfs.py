"""Unpack image files with squashfs-tools; nothing of the image is run or mounted."""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandboxes.errors import ImageError

COMPRESSION = "-comp zstd -Xcompression-level 3 -b 64K"
"""Arguments of mksquashfs, chosen by measurement. Every start of a sandbox mounts the image anew and reads it without a
cache, so the cost of a start is decompression. zstd is within a sixth of an uncompressed image's start at a third of
its size; gzip, the default, costs 1.4 times as much, and blocks of 1 MB 1.6 times as much.
"""

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
    run(["unsquashfs", *FLAGS, "-o", offset(apptainer, image), "-d", str(target), str(image), *inside])


def read_descriptor(apptainer: Path, image: Path) -> dict[str, Any]:
    """Return the configuration that an image from an OCI source has besides its files, if any.

    Raises:
        ImageError: The file is not an image.
    """
    listing = run([str(apptainer), "sif", "list", str(image)])
    for number in re.findall(r"^(\d+)\s*\|.*\|JSON\.Generic\s*$", listing, re.MULTILINE):
        try:
            found = json.loads(run([str(apptainer), "sif", "dump", number, str(image)]))
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and "data" not in found:  # else Apptainer's own words
            return found
    return {}


def offset(apptainer: Path, image: Path) -> str:
    """
    Raises:
        ImageError: The file is not an image, or has no squashfs in it.
    """
    listing = run([str(apptainer), "sif", "list", str(image)])
    found = re.search(r"\|(\d+)-\d+\s*\|FS \(Squashfs/", listing)
    if found is None:
        raise ImageError(f"{image} contains no squashfs file system", hint="set sandbox.unpack to false")
    return found[1]


def run(command: list[str]) -> str:
    """
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

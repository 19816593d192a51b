"""Images unpacked on disk, each once for all its sandboxes: no FUSE, a shared page cache, faster starts.

A folder is complete or not there: it is made beside its place and renamed. It belongs to the user that sandboxes
run as, and only below their overlay, so that none can change it. An image file that is replaced is another image;
the folder of the old one is removed when it has not been used for `KEEP_SECONDS`.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxes.errors import ImageError

UNPACK_SECONDS = 3600.0
KEEP_SECONDS = 7 * 24 * 3600.0


class UnpackedImages:
    """A folder of unpacked images, which several services of one user may share."""

    def __init__(self, apptainer: Path, root: Path, user: int, group: int) -> None:
        self._apptainer = apptainer
        self._root = root
        self._owner = (user, group)
        self._known: dict[tuple[str, int, int], Path] = {}

    async def provide(self, image: Path) -> Path:
        """The folder of an image file, unpacked now if it has not been: that takes seconds for each 100 MB.

        Raises:
            ImageError: it cannot be unpacked; the message is Apptainer's.
        """
        key = _identity(image)
        if key not in self._known:
            self._known[key] = await anyio.to_thread.run_sync(self._provide, key)
        return self._known[key]

    def _provide(self, key: tuple[str, int, int]) -> Path:
        name = hashlib.sha256(repr((key, self._owner)).encode()).hexdigest()[:24]
        folder = self._root / name
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked(name):
            if not folder.exists():
                self._prune()
                self._unpack(Path(key[0]), folder)
            os.utime(folder)
        return folder

    def _unpack(self, image: Path, folder: Path) -> None:
        draft = folder.with_suffix(".new")
        _remove(draft)
        offset = self._squashfs_offset(image)
        # Not by `apptainer build`, which as root asks for capabilities that containers and jobs often lack. What
        # an ordinary user cannot make, device files, is no failure: Apptainer brings a /dev of its own.
        flags = ["-quiet", "-no-progress", "-no-xattrs", "-no-exit-code"]
        _run(["unsquashfs", *flags, "-o", offset, "-d", str(draft), str(image)])
        if os.geteuid() == 0:
            _run(["chown", "-hR", "{}:{}".format(*self._owner), str(draft)])
        draft.rename(folder)

    def _squashfs_offset(self, image: Path) -> str:
        """Where the file system begins in the image file."""
        listing = _run([str(self._apptainer), "sif", "list", str(image)])
        found = re.search(r"\|(\d+)-\d+\s*\|FS \(Squashfs/", listing)
        if found is None:
            raise ImageError(f"{image} holds no squashfs", hint="set sandbox.unpack to false")
        return found[1]

    def _prune(self) -> None:
        """Remove folders that no sandbox has been started from for long; a sandbox lives for less."""
        for folder in self._root.iterdir():
            if folder.is_dir() and folder.stat().st_mtime < time.time() - KEEP_SECONDS:
                _remove(folder)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self._root / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(command, check=True, capture_output=True, timeout=UNPACK_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        raise ImageError(
            f"the image could not be unpacked: {said.decode(errors='replace').strip() or error}",
            hint="free disk space, install squashfs-tools, or set sandbox.unpack to false",
        ) from error
    return result.stdout.decode(errors="replace")


def _identity(image: Path) -> tuple[str, int, int]:
    """What makes a file this file: its path, its size and when it was written."""
    found = image.resolve().stat()
    return str(image.resolve()), found.st_size, found.st_mtime_ns


def _remove(folder: Path) -> None:
    if folder.exists():
        subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)

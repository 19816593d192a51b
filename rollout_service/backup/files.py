"""Copies of files that are replaced as a whole, or that only grow.

Guarantee: a copy can be read by its owner alone, and is on the disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rollout_service.base.private_files import make_private
from rollout_service.store.segments.proof import MARK_FILE
from rollout_service.store.segments.reference import FILE_NAME


def copy(source: Path, target: Path) -> None:
    """Copy a file.

    Raises:
        OSError: It cannot be read or written.
    """
    make_private(target)
    with source.open("rb") as read, target.open("r+b") as write:
        shutil.copyfileobj(read, write, 1 << 20)
        write.truncate()
        write.flush()
        os.fsync(write.fileno())


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files of a store's shared folder that the target lacks, or has less of.

    Raises:
        OSError: One cannot be read or written.
    """
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in shared_files(source):
        copied = target / path.name
        try:
            if not copied.exists() or copied.stat().st_size < path.stat().st_size:
                copy(path, copied)
        except FileNotFoundError:  # the store deleted it: nothing refers to it any more
            copied.unlink(missing_ok=True)


def shared_files(folder: Path) -> Iterator[Path]:
    """Yield the files that a store keeps in its shared folder, if it exists."""
    if folder.is_dir():
        yield from (
            path for path in folder.iterdir() if path.name == MARK_FILE or FILE_NAME.fullmatch(path.name)
        )

"""Files of an environment on their way into a sandbox, and files that a sandbox gives back."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from rollout_service.base.errors import ConfigurationError
from sandboxes import Sandbox
from sandboxes.errors import FileMissingError, FileTooLargeError

MAX_BYTES = 32 * 1024 * 1024
"""The limit for all files of an environment; larger files belong in its image."""
CHUNK_BYTES = 256 * 1024
ENTRY_BYTES = 4096
"""Each entry counts as at least this (see `Sandbox.export_path`)."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """`path` is below the folder in which it is unpacked."""

    path: str
    data: bytes
    executable: bool = False


def read_folder(folder: Path, *, without: Iterable[Path] = ()) -> tuple[PackedFile, ...]:
    """Read all regular files below a folder; follow links, and leave out images (`*.sif`).

    Raises:
        ConfigurationError: The files are too large to be copied into every sandbox.
    """
    left_out = {path.resolve() for path in without}
    files: list[PackedFile] = []
    size = 0
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix == ".sif" or path.resolve() in left_out:
            continue
        status = path.stat()
        size += status.st_size
        if size > MAX_BYTES:
            raise ConfigurationError(
                f"the files in {folder} exceed {MAX_BYTES} bytes, and each sandbox gets a copy",
                hint="Put large files into the image.",
            )
        files.append(PackedFile(str(path.relative_to(folder)), path.read_bytes(), bool(status.st_mode & 0o111)))
    return tuple(files)


async def archive(files: Iterable[PackedFile]) -> AsyncIterator[bytes]:
    packed = await anyio.to_thread.run_sync(_pack, tuple(files))
    for start in range(0, len(packed), CHUNK_BYTES):
        yield packed[start : start + CHUNK_BYTES]


async def exported_file(sandbox: Sandbox, path: str, limit: int) -> bytes:
    """Read a file of a sandbox from the host's side: no program inside takes part.

    Raises:
        FileMissingError: There is no regular file at the path.
        FileTooLargeError: The file has more than `limit` bytes.
        SandboxFileError: The file cannot be read.
        SandboxClosedError: The sandbox is closed or has ended.
    """
    packed = b"".join([part async for part in sandbox.export_path(path, limit=limit + 2 * ENTRY_BYTES)])
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as tar:
        entry = tar.next()
        file = tar.extractfile(entry) if entry is not None and entry.isreg() else None
        content = file.read(limit + 1) if file is not None else None
    if content is None:
        raise FileMissingError(f"{path}: not a regular file")
    if len(content) > limit:
        raise FileTooLargeError(f"{path}: more than {limit} bytes")
    return content


def _pack(files: tuple[PackedFile, ...]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for file in files:
            entry = tarfile.TarInfo(file.path)
            entry.size = len(file.data)
            entry.mode = 0o755 if file.executable else 0o644
            tar.addfile(entry, io.BytesIO(file.data))
    return buffer.getvalue()

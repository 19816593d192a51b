"""Files of an environment on their way into a sandbox: read once, packed as a tar archive."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from rollout_service.errors import ConfigurationError

MAX_BYTES = 32 * 1024 * 1024
"""Of all files of an environment; what is larger belongs into its image."""
CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file by its path below the folder that it is unpacked in."""

    path: str
    data: bytes
    executable: bool = False


def read_folder(folder: Path, *, without: Iterable[Path] = ()) -> tuple[PackedFile, ...]:
    """All regular files below a folder; links are followed, images (`*.sif`) are left out.

    Raises ConfigurationError when they are too large to be copied into every sandbox.
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
                f"the files in {folder} have more than {MAX_BYTES} bytes, and each sandbox would get a copy",
                hint="Put large files into the image.",
            )
        files.append(
            PackedFile(str(path.relative_to(folder)), path.read_bytes(), bool(status.st_mode & 0o111))
        )
    return tuple(files)


async def archive(files: Iterable[PackedFile]) -> AsyncIterator[bytes]:
    """The files as the chunks of a tar archive."""
    packed = await anyio.to_thread.run_sync(_pack, tuple(files))
    for start in range(0, len(packed), CHUNK_BYTES):
        yield packed[start : start + CHUNK_BYTES]


def _pack(files: tuple[PackedFile, ...]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for file in files:
            entry = tarfile.TarInfo(file.path)
            entry.size = len(file.data)
            entry.mode = 0o755 if file.executable else 0o644
            tar.addfile(entry, io.BytesIO(file.data))
    return buffer.getvalue()

"""The contract of the ledger, which counts the references to each segment file in the store that services share.

A file is registered before it exists. While it is open, its writer's records may be referenced. Once it is sealed, no
reference to it is accepted any more, and when the last one is dropped, it is garbage: it may be deleted.

References are counted by the store's own functions, in the step that writes or deletes the record that contains them:
that step is refused for a file that is not open. So a service that was taken for dead cannot refer to a file that has
been deleted in the meantime.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, Self


class SegmentLedger(Protocol):
    """
    Raises:
        StoreError: The store fails; every method can raise it.
    """

    async def mark(self, proposal: str | None) -> tuple[str, str | None]:
        """Return the random id of this store, and the mark of its shared folder, which becomes the proposal if there is
        none.
        """

    async def register(self, file: str, owner: str) -> None:
        """Open a file that this owner will write."""

    async def seal(self, files: Collection[str]) -> None:
        """Accept no more references to these files; idempotent."""

    async def orphans(self) -> Sequence[str]:
        """Return open files whose owner has left the cluster, or was declared dead."""

    async def garbage(self, limit: int) -> Sequence[str]:
        """Return up to `limit` sealed files without references."""

    async def forget(self, files: Collection[str]) -> None:
        """Remove garbage from the ledger once it is deleted."""

    async def unknown(self, files: Collection[str]) -> Sequence[str]:
        """Return those of the files that are neither open, nor referenced, nor garbage."""


# A file begins with FILE_HEADER. A record is its length and its CRC-32 (uint32 each, little-endian), then its bytes. A
# reference is the text `FILE:OFFSET:LENGTH:CRC`, with the CRC in hexadecimal digits.

FILE_HEADER = b"rollout segment 1\n"
FILE_NAME = re.compile(r"[0-9a-f]{12}-[0-9]{1,12}\.segment", re.ASCII)
DRAFT_SUFFIX = ".draft"
_HEADER = struct.Struct("<II")
_FORM = re.compile(rf"({FILE_NAME.pattern}):([0-9]{{1,15}}):([0-9]{{1,10}}):([0-9a-f]{{8}})", re.ASCII)


@dataclass(frozen=True, slots=True)
class SegmentReference:
    """Where a record is, and how to know it.

    Length and checksum are also before the bytes, so a torn, overwritten or exchanged file is always noticed.
    """

    file: str
    offset: int
    """The place of the record's header, in bytes."""
    length: int
    """Bytes without the header."""
    crc: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """
        Raises:
            ValueError: The text is not a reference.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a reference to a record")
        file, offset, length, crc = found.groups()
        return cls(file, int(offset), int(length), int(crc, 16))

    def __str__(self) -> str:
        return f"{self.file}:{self.offset}:{self.length}:{self.crc:08x}"

    @property
    def framed_length(self) -> int:
        """Bytes with the header."""
        return _HEADER.size + self.length

    def extract(self, framed: bytes) -> bytes:
        """
        Raises:
            ValueError: These are not the bytes that were written.
        """
        if len(framed) != self.framed_length:
            raise ValueError(f"the file ends {self.framed_length - len(framed)} bytes too early")
        data = framed[_HEADER.size :]
        if _HEADER.unpack_from(framed) != (self.length, self.crc) or zlib.crc32(data) != self.crc:
            raise ValueError("the checksum is wrong")
        return data


def frame(file: str, offset: int, data: bytes) -> tuple[SegmentReference, bytes]:
    """Return a record's reference and its header."""
    crc = zlib.crc32(data)
    return SegmentReference(file, offset, len(data), crc), _HEADER.pack(len(data), crc)

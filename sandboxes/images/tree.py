"""Read the files of an unpacked image, which may be hostile, from the host.

Links are followed as inside, and none leads out of the tree. Only plain files are read, each up to a bound. Nothing of
the image is run.
"""

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from sandboxes.host.kernel_calls import find_inside

READ_LIMIT = 8 * 1024 * 1024
ELF_MACHINES = {62: "x86_64", 183: "aarch64", 21: "ppc64le", 22: "s390x", 243: "riscv64"}
PT_INTERP = 3


@dataclass(frozen=True, slots=True)
class Program:
    machine: str
    """As `uname -m` prints it, or the number in the header."""

    loader: str | None


class ImageTree:
    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, path: str) -> str | None:
        """Follow every link in the path; return None if it leads nowhere."""
        root = str(self.root)
        try:
            found = find_inside(root, path)
        except (OSError, ValueError):
            return None
        return (found.removeprefix(root) or "/") if os.path.lexists(found) else None

    def host(self, found: str) -> Path:
        return self.root / found.lstrip("/")

    def read(self, path: str, limit: int = READ_LIMIT) -> bytes | None:
        """Return the first bytes of a plain file; None for anything else."""
        found = self.find(path)
        if found is None:
            return None
        try:
            if not stat.S_ISREG(self.host(found).lstat().st_mode):
                return None
            with self.host(found).open("rb") as file:
                return file.read(limit)
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Return sorted names; none if there is no folder."""
        found = self.find(path)
        try:
            return sorted(path.name for path in self.host(found).iterdir()) if found is not None else []
        except OSError:
            return []

    def executable(self, path: str) -> str | None:
        """Return where the path leads if that is an executable plain file."""
        found = self.find(path)
        if found is None:
            return None
        mode = self.host(found).lstat().st_mode
        return found if stat.S_ISREG(mode) and mode & 0o111 else None

    def program(self, path: str) -> Program | None:
        """Read a 64-bit little-endian ELF program; None for anything else, such as a script."""
        data = self.read(path, 64 * 1024)
        if data is None or data[:6] != b"\x7fELF\x02\x01":
            return None
        try:
            (machine,) = struct.unpack_from("<H", data, 18)
            (table,) = struct.unpack_from("<Q", data, 32)
            size, count = struct.unpack_from("<HH", data, 54)
            loader = _loader(data, table, size, count)
        except struct.error:
            return None
        return Program(ELF_MACHINES.get(machine, str(machine)), loader)

    def size_bytes(self) -> int:
        """Count each inode once."""
        seen: set[int] = set()
        total = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                status = os.lstat(os.path.join(folder, name))  # noqa: PTH118  this runs for every file
                if status.st_ino not in seen:
                    seen.add(status.st_ino)
                    total += status.st_size
        return total


def _loader(data: bytes, table: int, size: int, count: int) -> str | None:
    """Find the interpreter in program headers. Offsets are those of the 64-bit structures in elf.h."""
    for number in range(count):
        entry = table + number * size
        (kind,) = struct.unpack_from("<I", data, entry)
        if kind == PT_INTERP:
            (offset,) = struct.unpack_from("<Q", data, entry + 8)
            (length,) = struct.unpack_from("<Q", data, entry + 32)
            return data[offset : offset + length].rstrip(b"\0").decode(errors="replace")
    return None

"""A small file system of its own for a test, without root: it is filled, made read-only, and is gone after the test."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HOLD = 'mount -t tmpfs -o size="$2",mode=0700 tmpfs "$1" && echo mounted && exec sleep infinity'
"""Mounts a file system in namespaces of its own, and keeps them."""
READ_ONLY = """
mkdir "$1.copy" && mount -t tmpfs -o mode=0700 tmpfs "$1.copy" && cp -a "$1/." "$1.copy" &&
mount -o remount,ro "$1.copy" && mount --bind "$1.copy" "$1"
"""
FILLER = "filler"


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """A mounted file system."""

    folder: Path
    """Leads into the namespaces of the process that holds it; everyone may use this path."""
    inside: Path
    pid: int

    def make_read_only(self, name: str) -> None:
        """Mount a folder again, read-only, as a server that lost its disk may export it."""
        self._run(READ_ONLY, name)

    def make_writable(self, name: str) -> None:
        """Undo `make_read_only`."""
        self._run('umount "$1" "$1.copy" && rmdir "$1.copy"', name)

    def _run(self, script: str, name: str) -> None:
        enter = ["nsenter", "--user", "--preserve-credentials", "--mount", "--target", str(self.pid)]
        subprocess.run([*enter, "sh", "-c", script, "sh", str(self.inside / name)], check=True)

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.folder / FILLER).open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4_096))

    def free(self) -> None:
        """Undo `fill`."""
        (self.folder / FILLER).unlink()


@contextmanager
def small_disk(point: Path) -> Iterator[SmallDisk]:
    """Mount a file system for the block; `point` becomes an empty folder."""
    point.mkdir()
    namespaces = ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private", "--"]
    command = [*namespaces, "sh", "-c", HOLD, "sh", str(point), "2m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "mounted\n"
            yield SmallDisk(Path(f"/proc/{holder.pid}/root{point}"), point, holder.pid)
        finally:
            holder.kill()

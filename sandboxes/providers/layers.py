"""Snapshots of files: what one sandbox wrote becomes a layer below others, without a copy.

The files stay in a file system in memory that exists only in the mounts of the sandbox's launcher. A layer holds these
mounts, and the folder that they are mounted on, since removing that would unmount it. The launcher of each sandbox that
starts from the layer copies the mount; see `apptainer.launch`.

If the service is killed, the kernel frees the memory with the last descriptor, and the reaper removes the folder.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxes.contract import Snapshot
from sandboxes.errors import SandboxClosedError, SandboxConfigError
from sandboxes.reclaim.rmtree import remove_tree
from sandboxes.reclaim.run_folders import RunFolder

MAX_LAYERS = 32
"""Snapshots that one is made from in turn; the kernel allows 500, and each start mounts all."""
REMOVE_SECONDS = 30.0
INODE_BYTES = 2_000
"""About the kernel's memory for a file and its name."""


class FileLayer:
    """Its files are freed once no snapshot and no sandbox uses them."""

    def __init__(self, folder: RunFolder, launcher: int, owner: int, *, has_users: bool) -> None:
        """`owner` is the files' user on the host; `launcher` is the process that mounted them.

        `has_users` tells whether it has a user namespace of its own.

        Raises:
            OSError: The launcher has ended.
        """
        self._folder = folder
        self._owner = owner
        self._uses = 0
        space = os.statvfs(f"/proc/{launcher}/root{folder.overlay}")
        self.size_bytes = (space.f_blocks - space.f_bfree) * space.f_frsize
        self.size_bytes += (space.f_files - space.f_ffree) * INODE_BYTES
        """In memory."""
        self._namespaces: list[int] = []
        try:
            for name in ("mnt", "user") if has_users else ("mnt",):
                self._namespaces.append(os.open(f"/proc/{launcher}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self._close()
            raise

    @property
    def descriptors(self) -> list[int]:
        return list(self._namespaces)

    @property
    def instruction(self) -> str:
        mounts, users = (*self._namespaces, -1)[:2]
        return f"{mounts} {users} {self._owner} {self._folder.overlay}"

    def hold(self) -> None:
        self._uses += 1

    async def release(self) -> None:
        """End a use; the last one frees the files."""
        self._uses -= 1
        if self._uses == 0:
            await anyio.to_thread.run_sync(self._free)

    def _free(self) -> None:
        """Free the files. Closing the last descriptor takes seconds if there are many."""
        self._close()
        remove_tree(self._folder.path, time.monotonic() + REMOVE_SECONDS)

    def _close(self) -> None:
        while self._namespaces:
            os.close(self._namespaces.pop())


class LayeredSnapshot(Snapshot):
    def __init__(self, image: Path, layers: Sequence[FileLayer]) -> None:
        """The newest of at most `MAX_LAYERS` layers comes first."""
        self._image, self._layers, self._closed = image, tuple(layers), False
        for layer in self._layers:
            layer.hold()

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self._layers)

    def layers_on(self, image: Path) -> tuple[FileLayer, ...]:
        """Return the newest layer first.

        Raises:
            SandboxClosedError: The snapshot is closed.
            SandboxConfigError: The snapshot was made with another image file, or another unpacking of it.
        """
        if self._closed:
            raise SandboxClosedError("the snapshot has been closed")
        if image != self._image:
            raise SandboxConfigError(
                f"the snapshot was made with the image {self._image}, not with {image}",
                hint="make it again: the image was built anew since then",
            )
        return self._layers

    async def close(self) -> None:
        closed, self._closed = self._closed, True
        if not closed:
            with anyio.CancelScope(shield=True):
                for layer in self._layers:
                    await layer.release()

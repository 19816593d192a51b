"""Whether the shared folder can be used, as this service last saw it.

Guarantees: a folder that was lost, exchanged, filled, made read-only, or that does not answer, is noticed within
seconds although nothing is written; once it is usable again, that is noticed by itself. After the store's folder was
exchanged for a new one on purpose, the new one is used without a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import anyio.to_thread

from rollout_service.base.errors import StoreError
from rollout_service.store.segments.ledger import SegmentLedger
from rollout_service.store.segments.problems import folder_hangs
from rollout_service.store.segments.proof import FolderMark, FolderProof

CHECK_SECONDS = 5.0
"""How often the folder is checked. A check writes one small file."""
AGAIN_SECONDS = 1.0
"""How often it is checked while it cannot be used."""
HANGS_SECONDS = 10.0
"""How long a check may take; file systems over a network wait for their server without end."""
WRITE_SECONDS = 3.0
"""How long a failed write counts: a small file may still fit where a record does not."""


class FolderWatch:
    """Checks the folder, and hears of what failed there."""

    def __init__(self, proof: FolderProof, ledger: SegmentLedger) -> None:
        self._proof = proof
        self._ledger = ledger
        self._checked: StoreError | None = None
        """The result of the last check."""
        self._write: StoreError | None = None
        self._write_failed_at = 0.0
        self.tell: Callable[[StoreError | None], None] = lambda _: None
        """Told why the folder cannot be used, or None, whenever that was looked at."""

    @property
    def problem(self) -> StoreError | None:
        """Why the folder cannot be used, or None."""
        recent = time.monotonic() - self._write_failed_at < WRITE_SECONDS
        return self._checked or (self._write if recent else None)

    async def run(self) -> None:
        """Check again and again, until cancelled."""
        while True:
            await anyio.sleep(CHECK_SECONDS if self.problem is None else AGAIN_SECONDS)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._tell_if_it_hangs)
                await self.check()
                tasks.cancel_scope.cancel()

    async def check(self) -> None:
        """Check now whether the folder is the one that the store uses, and can be written."""
        await self.follow()
        try:
            # A check that waits for a file server must not hold up the end of the service.
            await anyio.to_thread.run_sync(self._proof.check_usable, abandon_on_cancel=True)
        except StoreError as error:
            self._found(error)
        else:
            self._found(None)

    async def follow(self) -> None:
        """Learn which folder the store uses now: it may have been exchanged, or Redis may have lost everything."""
        try:
            self._proof.mark = FolderMark(await self._ledger.store_id(), await self._ledger.mark(None))
        except StoreError:
            return  # the store itself fails, and says so

    def wrote(self, error: StoreError | None) -> None:
        """Hear how a write to the folder ended. One that succeeded proves little: its file was open before."""
        self._write = error
        if error is not None:
            self._write_failed_at = time.monotonic()
        self.tell(self.problem)

    def _found(self, error: StoreError | None) -> None:
        self._checked = error
        self.tell(self.problem)

    async def _tell_if_it_hangs(self) -> None:
        await anyio.sleep(HANGS_SECONDS)
        self._found(folder_hangs(self._proof.folder, HANGS_SECONDS))

"""Stops everything inside a sandbox between two uses of it.

One `Freezer` owns the state of one sandbox, on the event loop. Nothing is awaited between a decision and its write to
the kernel, so no use begins in a frozen sandbox, and none is frozen, whatever is cancelled.
"""

import select
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxes.errors import SandboxConfigError, SandboxPauseError, SandboxResumeError
from sandboxes.limits.cgroups import ControlGroup

FREEZE_SECONDS = 2.0
"""The kernel may take so long to stop everything; it waits for calls that nothing interrupts, as of a lost disk."""


class Freezer:
    """A context for each use of a sandbox; any number may overlap."""

    def __init__(self, group: ControlGroup | None) -> None:
        """Without a group that can be frozen, every `freeze` is refused."""
        self._group = group
        self._folder = group.folders.get("freezer") if group is not None else None
        self._uses = 0
        self._freezing = anyio.Lock(fast_acquire=True)
        self._stopping = anyio.CancelScope()
        self.frozen = False

    def __enter__(self) -> None:
        if self.frozen:
            self._thaw()
        self._uses += 1

    def __exit__(self, *_: object) -> None:
        self._uses -= 1

    async def freeze(self) -> bool:
        """Stop everything inside unless it is used; return whether it is stopped. Cancellation leaves that open.

        Raises:
            SandboxConfigError: It cannot be stopped here.
            SandboxPauseError: The kernel did not stop it, so it runs.
        """
        if self._folder is None:
            raise SandboxConfigError(
                "sandboxes cannot be paused here",
                hint="this needs Apptainer, and a control group of version 2 in which this user may make others",
            )
        async with self._freezing:
            if self._uses:
                return False
            try:
                self._write(frozen=True)
                with anyio.fail_after(FREEZE_SECONDS) as self._stopping:  # a use cancels it
                    await _wait_until_frozen(self._folder / "cgroup.events")
            except OSError as error:  # a TimeoutError too
                self._release()
                if not self._folder.exists():  # the sandbox was closed meanwhile
                    return False
                why = str(error) or f"a process did not stop within {FREEZE_SECONDS:g} s"
                raise SandboxPauseError(f"the sandbox cannot be paused: {why}") from error
            return self.frozen

    async def reclaim(self) -> int:
        """Give back memory while it is stopped; return how many bytes."""
        if self._group is None or not self.frozen or "memory" not in self._group.folders:
            return 0
        take = partial(self._group.reclaim, lambda: self.frozen)
        with suppress(OSError):  # the sandbox has ended
            return await anyio.to_thread.run_sync(take, abandon_on_cancel=True)
        return 0

    def _thaw(self) -> None:
        """
        Raises:
            SandboxResumeError: The kernel refuses.
        """
        try:
            self._write(frozen=False)
        except OSError as error:
            raise SandboxResumeError(f"the paused sandbox cannot be resumed: {error}") from error
        self._stopping.cancel()

    def _write(self, *, frozen: bool) -> None:
        if self._folder is not None and frozen != self.frozen:
            (self._folder / "cgroup.freeze").write_text(f"{int(frozen)}\n")
        self.frozen = frozen

    def _release(self) -> None:
        with suppress(SandboxResumeError):
            self._thaw()

    def close(self) -> None:
        """Let it run for good, so that it can end by itself; if the kernel refuses, it can still be killed."""
        self._uses += 1
        self._release()


async def _wait_until_frozen(events: Path) -> None:
    """Wait by an epoll, since the event loop can wait for it, but not for such a file."""
    with events.open("rb", buffering=0) as file, select.epoll() as changes:
        changes.register(file, select.EPOLLPRI)
        while b"frozen 1" not in file.read():
            await anyio.wait_readable(changes)
            file.seek(0)

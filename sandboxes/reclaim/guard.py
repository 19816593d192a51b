"""The guard of a service: a process that outlives it for as long as it takes to remove what it left.

It waits for the end of a pipe whose other end the service alone holds. A word on it is a goodbye, after a clean
close; its end without one is the service's death, by whatever cause. Until then the guard is a waiting `sh` of
a few hundred kilobytes; only then it becomes Python, with the standard library and this package's own sweep.

It has a session of its own, so that what ends the service's process group spares it, and it ignores signals that
ask: those come to whole jobs and terminals, where the service's own end decides. Whatever kills the guard as well,
the next start's sweep does its work.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from sandboxes.reclaim.reaper import sweep_service

WAIT = 'trap "" HUP INT TERM; if read -r word; then exit 0; fi; exec "$@"'
# The package without its `__init__`, which imports all that a service needs.
SWEEP = (
    "import sys, types; package = sys.modules['sandboxes'] = types.ModuleType('sandboxes'); "
    "package.__path__ = [sys.argv[1]]; from sandboxes.reclaim.guard import main; main(*sys.argv[2:])"
)
GUARD_SECONDS = 60.0
PAUSE = 0.1
GOODBYE_SECONDS = 5.0


class Guard:
    """The guard's process, and this service's end of its pipe."""

    def __init__(self, folder: Path, groups: list[str]) -> None:
        """Start it for the service's folder; that takes a millisecond or two.

        Raises:
            OSError: no process can be started.
        """
        sweep = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            SWEEP,
            str(Path(__file__).parents[1]),
            str(folder),
            *groups,
        ]
        theirs, self._pipe = os.pipe()
        try:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", WAIT, "guard", *sweep],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath},
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)

    @property
    def alive(self) -> bool:
        """Whether it watches."""
        return self.process.poll() is None

    def dismiss(self, *, clean: bool) -> None:
        """Close the pipe, with a goodbye where nothing is left to do, and collect a guard that ends at once.

        Called once. Without the goodbye the guard sweeps what it can, after this process if need be.
        """
        with suppress(BrokenPipeError):
            if clean:
                os.write(self._pipe, b"bye\n")
        os.close(self._pipe)
        if clean:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GOODBYE_SECONDS)


def main(folder: str, *groups: str) -> None:
    """Sweep what the service left, again until nothing is left. Its lock is free as soon as it is dead."""
    deadline = time.monotonic() + GUARD_SECONDS
    while time.monotonic() < deadline:
        swept = sweep_service(Path(folder), groups)
        if swept is not None and not swept.failures:
            return
        time.sleep(PAUSE)

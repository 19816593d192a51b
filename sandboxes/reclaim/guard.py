"""The guard of a service: a process that outlives it for as long as it takes to remove the service's remains.

It waits for the end of a pipe whose other end only the service holds. A word on the pipe is a goodbye after a clean
close; an end without one means that the service died, by whatever cause. Until then the guard is a waiting `sh` of a
few hundred kilobytes. Only then does it become Python, with the standard library and this package's own sweep.

It has its own session, so whatever ends the service's process group spares it, and ignores SIGHUP, SIGINT, SIGTERM,
SIGUSR1 and SIGUSR2, which are sent to whole jobs and terminals. If the guard is killed too, the sweep of the next start
does its work.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from sandboxes.reclaim.reaper import sweep_service

WAIT = 'trap "" HUP INT TERM USR1 USR2; if read -r word; then exit 0; fi; exec "$@"'
# The package without its `__init__`, which imports everything that a service needs.
SWEEP = (
    "import sys, types; package = sys.modules['sandboxes'] = types.ModuleType('sandboxes'); "
    "package.__path__ = [sys.argv[1]]; from sandboxes.reclaim.guard import main; main(*sys.argv[2:])"
)
GUARD_SECONDS = 60.0
PAUSE = 0.1
GOODBYE_SECONDS = 5.0


class Guard:
    def __init__(self, folder: Path, groups: list[str]) -> None:
        """Start a guard, in a millisecond or two.

        Raises:
            OSError: No process can be started.
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
        return self.process.poll() is None

    def dismiss(self, *, clean: bool) -> None:
        """Close the pipe, with a goodbye if nothing is left to do.

        Call it once. Without the goodbye the guard sweeps as much as it can, even after this process has ended.
        """
        with suppress(BrokenPipeError):
            if clean:
                os.write(self._pipe, b"bye\n")
        os.close(self._pipe)
        if clean:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GOODBYE_SECONDS)


def main(folder: str, *groups: str) -> None:
    """Sweep the service's remains until there are none. Its lock is free as soon as it is dead."""
    deadline = time.monotonic() + GUARD_SECONDS
    while time.monotonic() < deadline:
        swept = sweep_service(Path(folder), groups)
        if swept is not None and not swept.failures:
            return
        time.sleep(PAUSE)

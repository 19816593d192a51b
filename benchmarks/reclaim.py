"""Count what outlives a service that is killed with SIGKILL while it starts, uses, and closes sandboxes.

Run: python benchmarks/reclaim.py [--json FILE] [--quick | --smoke]

Each round starts a service (`programs/churn.py`) and kills it after a random time; every other round kills its process
group too. Five seconds later the benchmark counts what is left: processes (it adopts every orphan, so none can hide),
mounts in any mount namespace that it can read, control groups, and whatever is in the run folder. A second service in
the same run folder keeps a sandbox through all rounds and must keep working.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread
import psutil
from common import HERE, Figures, Options, report, run
from rich.console import Console

from sandboxes import ProviderUnavailableError
from sandboxes.host.facts import find_apptainer

ROUNDS, QUICK_ROUNDS, SMOKE_ROUNDS = 50, 12, 2
ALLOWED_SECONDS = 5.0
LONGEST_LIFE = 4.0
WORKERS = 6
POLL = 0.02
PR_SET_CHILD_SUBREAPER = 36
CGROUPS = Path("/sys/fs/cgroup")


@dataclass
class Round:
    """One service, from the moment before it is killed."""

    seconds: float = ALLOWED_SECONDS
    services: set[str] = field(default_factory=set)
    sandboxes: int = 0
    processes: int = 0
    guard_kilobytes: int = 0
    left: list[str] = field(default_factory=list)


class Arena:
    """The run folder of all rounds, and the services that may be in it."""

    def __init__(self, folder: Path, provider: str) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.provider = provider
        self.bystander = self.start(0)
        self.ask("ready", "")
        self.services = {path.name for path in self.run.iterdir()}

    def start(self, workers: int) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            str(HERE / "programs" / "churn.py"),
            str(self.run),
            str(self.folder / "state"),
        ]
        pipe = None if workers else subprocess.PIPE
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [*command, str(workers), self.provider],
                stdin=pipe,
                stdout=pipe,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def ask(self, expected: str, question: str = "well?\n") -> None:
        """Check that the bystander's sandbox works.

        Raises:
            RuntimeError: The sandbox does not work.
        """
        if self.bystander.stdin is None or self.bystander.stdout is None:
            raise RuntimeError("the bystander has no pipes")
        self.bystander.stdin.write(question)
        self.bystander.stdin.flush()
        if (answer := self.bystander.stdout.readline().strip()) != expected:
            raise RuntimeError(f"the other service was harmed: {answer!r}, see {self.folder / 'log'}")

    def close(self) -> None:
        if self.bystander.stdin is not None:
            self.bystander.stdin.close()
        self.bystander.wait(30)
        if self.bystander.stdout is not None:
            self.bystander.stdout.close()

    def round(self, life: float, *, group: bool) -> Round:
        """Start a service, kill it, and count what is left."""
        victim = self.start(WORKERS)
        time.sleep(life)
        if victim.poll() is not None:
            raise RuntimeError(f"the service ended by itself: {(self.folder / 'log').read_text()[-2000:]}")
        victim.send_signal(signal.SIGSTOP)  # the count is then exactly what it has when it dies
        found = self.count(victim)
        begun = time.monotonic()
        if group:
            os.killpg(victim.pid, signal.SIGKILL)
        else:
            victim.kill()
        victim.wait()
        while time.monotonic() < begun + ALLOWED_SECONDS:
            # Mount tables take long to read; this waits until everything else is gone.
            found.left = self.left(found.services, mounts=False) or self.left(found.services)
            if not found.left:
                found.seconds = time.monotonic() - begun
                return found
            time.sleep(POLL)
        return found

    def count(self, victim: subprocess.Popen[str]) -> Round:
        services = {path.name for path in self.run.iterdir()} - self.services
        below = psutil.Process(victim.pid).children(recursive=True)
        folders = [path for name in services for path in (self.run / name).iterdir() if path.is_dir()]
        pss = [_pss(child.pid) for child in below if _is_guard(child, victim.pid)]
        return Round(
            services=services,
            sandboxes=len(folders),
            processes=len(below),
            guard_kilobytes=max(pss, default=0),
        )

    def left(self, services: set[str], *, mounts: bool = True) -> list[str]:
        """Return everything that should not be there."""
        found = [f"process {process}" for process in self._orphans()]
        strangers = [path for path in self.run.iterdir() if path.name not in self.services]
        found += [f"folder {path}" for path in strangers]
        walks = [entry for path in strangers for entry in os.walk(path)]  # tolerates entries that vanish meanwhile
        found += [f"file {Path(where) / name}" for where, folders, files in walks for name in (*folders, *files)]
        found += [f"group {path}" for path in _groups(services)]
        if mounts:
            found += [f"mount {line}" for line in _mounts(self.run, self.services)]
        return found

    def _orphans(self) -> list[psutil.Process]:
        """Return the processes that this one has adopted, except the bystander's and zombies."""
        known = {self.bystander.pid}
        with _gone():
            known |= {process.pid for process in psutil.Process(self.bystander.pid).children(recursive=True)}
        found = []
        for process in psutil.Process().children(recursive=True):
            with _gone():
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
                elif process.ppid() == os.getpid() and process.pid not in known:
                    os.waitpid(process.pid, os.WNOHANG)
        return [process for process in found if process.pid not in known]


def _gone() -> AbstractContextManager[None]:
    """Ignore errors from processes that end while they are examined."""
    return suppress(psutil.Error, OSError)


def _is_guard(process: psutil.Process, owner: int) -> bool:
    with _gone():
        return process.ppid() == owner and "guard" in process.cmdline()
    return False


def _pss(pid: int) -> int:
    with _gone():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 0


def _groups(services: set[str]) -> list[str]:
    """Return the control groups of these services, wherever they are."""
    return [
        str(Path(where) / name)
        for where, names, _ in os.walk(CGROUPS)
        for name in names
        if name.startswith("rollout-") and name.split("-")[1] in services
    ]


def _mounts(run: Path, spared: set[str]) -> list[str]:
    """Return the lines of every readable mount table that name the run folder, except those of live services."""
    lines = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with _gone():
                lines |= set((entry / "mountinfo").read_text(errors="replace").splitlines())
    name = f"/{run.parent.name}/run"
    return [line for line in lines if name in line and not any(one in line for one in spared)]


def _measure(provider: str, lives: list[float], progress: Callable[[str], None]) -> list[Round]:
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp") as folder:  # short, since sockets are created in it
        Path(folder).chmod(0o755)  # sandboxes run as other users, who must reach their folders
        return _rounds(Arena(Path(folder), provider), lives, progress)


def _rounds(arena: Arena, lives: list[float], progress: Callable[[str], None]) -> list[Round]:
    rounds = []
    try:
        for number, life in enumerate(lives):
            one = arena.round(life, group=number % 2 == 1)
            arena.ask("well")
            rounds.append(one)
            for left in one.left:
                progress(f"round {number}: {left}")
        for one in rounds:  # catches leftovers that came back or appeared late
            one.left = one.left or arena.left(one.services)
    finally:
        arena.close()
    if remaining := arena.left(arena.services):
        rounds[-1].left += remaining
    return rounds


async def main(given: Options) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    rounds = given.plan(ROUNDS, QUICK_ROUNDS, SMOKE_ROUNDS)
    lives = [draw.uniform(0.0, LONGEST_LIFE) for _ in range(rounds)]
    try:
        provider = "apptainer" if find_apptainer() else "local"
    except ProviderUnavailableError:
        provider = "local"
    console = Console(stderr=True)
    found = await anyio.to_thread.run_sync(_measure, provider, lives, console.print)
    seconds = [one.seconds for one in found]
    figures: Figures = {
        "rounds": len(found),
        "leftovers": sum(len(one.left) for one in found),
        "reclaim_s_p50": statistics.median(seconds),
        "reclaim_s_max": max(seconds),
        "sandboxes_killed": sum(one.sandboxes for one in found),
        "processes_killed": sum(one.processes for one in found),
        "guard_pss_mb": max(one.guard_kilobytes for one in found) / 1e3,
    }
    settings = {"provider": provider, "seed": seed, "workers": WORKERS, "allowed_seconds": ALLOWED_SECONDS}
    report("What outlives a service", given, settings, figures, {"leftovers": "0", "reclaim_s_max": "<= 5"})


if __name__ == "__main__":
    run(main, "Count what outlives a service that is killed.")

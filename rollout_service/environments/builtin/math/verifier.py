"""Checks in a separate process whether an answer equals the gold answer (see `worker`).

Guarantees: the workers belong to a verifier, not to an event loop; they start with the first check and end with the
verifier or the service; a cancelled check runs on until its own limits end it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections import deque
from importlib.util import find_spec
from typing import Final

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError
from rollout_service.environments.builtin.math.worker import MathVerdict
from sandboxes.extras import extra_hint

CPU_SECONDS: Final = 5
MAX_CHARS: Final = 4_096
"""A longer answer counts as unreadable."""


def require_math_verify() -> None:
    """Raise ConfigurationError on a machine that lacks the package."""
    if find_spec("math_verify") is None:
        raise ConfigurationError(
            "comparing answers mathematically needs the package math-verify, which is not installed",
            hint=f"{extra_hint('math')}.",
        )


class MathVerifier:
    """Checks up to `processes` answers at once, each with `cpu_seconds` of CPU time."""

    def __init__(self, processes: int = 2, cpu_seconds: int = CPU_SECONDS) -> None:
        self._processes = processes
        self._cpu_seconds = cpu_seconds
        self._idle: deque[_Worker] = deque()
        self._limiters: RunVar[anyio.CapacityLimiter] = RunVar(f"math-verifier-{id(self)}")
        weakref.finalize(self, _close, self._idle)

    async def compare(self, gold: str, answer: str) -> MathVerdict:
        """Compare LaTeX expressions.

        Raises:
            EnvironmentFailedError: The gold answer cannot be read, or the check itself failed.
        """
        if len(answer) > MAX_CHARS:
            return MathVerdict.UNREADABLE
        found = await anyio.to_thread.run_sync(
            self._compare, gold, answer, abandon_on_cancel=True, limiter=self._limiter()
        )
        try:
            return MathVerdict(found)
        except ValueError:
            raise EnvironmentFailedError(
                f"the gold answer {gold[:200]!r} could not be checked: {found}",
                hint="Write it as LaTeX that math-verify reads, without `$`.",
            ) from None

    def _compare(self, gold: str, answer: str) -> str:
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker()
        try:
            found = worker.compare(gold, answer, self._cpu_seconds)
        except BaseException:
            worker.close()
            raise
        self._idle.append(worker)
        while len(self._idle) > self._processes:  # cancelled checks may have needed more processes
            self._idle.popleft().close()
        return found

    def _limiter(self) -> anyio.CapacityLimiter:
        limiter = self._limiters.get(None)
        if limiter is None:
            limiter = anyio.CapacityLimiter(self._processes)
            self._limiters.set(limiter)
        return limiter


class _Worker:
    """Its methods block."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollout_service.environments.builtin.math.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the service; this process ends with its input
            text=True,
        )

    def compare(self, gold: str, answer: str, cpu_seconds: int) -> str:
        """Return the verdict, or why there is none."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the worker was started without pipes")
        try:
            self._process.stdin.write(json.dumps([gold, answer, cpu_seconds]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise EnvironmentFailedError(
                "a process that checks answers ended",
                hint="Check whether the kernel's out-of-memory killer ended it.",
            )
        return str(json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _close(workers: deque[_Worker]) -> None:
    while workers:
        workers.pop().close()

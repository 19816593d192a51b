"""Whether an answer equals the gold answer, worked out where it can be killed.

sympy may take forever, or all memory, on what a model writes (`9^{9^{9^{9}}}`), and nothing inside of the
process can stop it. So each check runs in a process forked for it alone, with limits of CPU time and memory
that the kernel holds; it forks from a warm worker process, since importing sympy takes two seconds.

A verdict is only ever given once the gold answer was parsed, and compared with 0, under the same limits. What
happens after that is the answer's doing, so running out of CPU time or memory there is a verdict; a process that
ends in any other way is a failure, and nobody's score.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource
import signal
from collections.abc import Callable
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any, Final

import anyio
import anyio.to_process
from anyio.lowlevel import RunVar

from rollout_service.errors import EnvironmentFailedError

CPU_SECONDS: Final = 5
MEMORY_BYTES: Final = 2 * 1024**3
"""Address space of one check; the imports alone take about a quarter of it."""
WALL_SECONDS: Final = 60.0
"""A loaded machine gives a check its CPU time late; this only ends one that hangs without using any."""
GOLD_READ: Final = "gold read"
MAX_CHARS: Final = 4_096
"""No answer of this length is an answer; it is not even tried."""


class Verdict(StrEnum):
    """What a check found."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNREADABLE = "unreadable"
    """The answer is no mathematics, or too long."""
    TOO_COSTLY = "too_costly"
    """Comparing it ran out of CPU time or memory."""


class MathVerifier:
    """Checks answers, `processes` of them at once; the worker processes start with the first check.

    It may be used from one event loop after the other.
    """

    def __init__(self, processes: int = 2, cpu_seconds: int = CPU_SECONDS) -> None:
        self._processes = processes
        self._cpu_seconds = cpu_seconds
        self._limiters: RunVar[anyio.CapacityLimiter] = RunVar(f"math-verifier-{id(self)}")

    async def compare(self, gold: str, answer: str) -> Verdict:
        """Compare two pieces of LaTeX by their mathematics.

        Raises EnvironmentFailedError when the gold answer cannot be read, or the check itself fails.
        """
        if len(answer) > MAX_CHARS:
            return Verdict.UNREADABLE
        try:
            found = await anyio.to_process.run_sync(
                compare_in_fork, gold, answer, self._cpu_seconds, cancellable=True, limiter=self._limiter()
            )
        except anyio.BrokenWorkerProcess as error:
            raise EnvironmentFailedError(
                "a process that checks answers ended", hint="Look for the kernel's out-of-memory killer."
            ) from error
        if isinstance(found, Verdict):
            return found
        raise EnvironmentFailedError(
            f"the gold answer {gold[:200]!r} could not be checked: {found}",
            hint="Write it as LaTeX that math-verify reads, without `$`.",
        )

    def _limiter(self) -> anyio.CapacityLimiter:
        limiter = self._limiters.get(None)
        if limiter is None:
            limiter = anyio.CapacityLimiter(self._processes)
            self._limiters.set(limiter)
        return limiter


def compare_in_fork(gold: str, answer: str, cpu_seconds: int) -> Verdict | str:
    """The verdict, or why there is none. Runs in a worker process, which has one thread and may fork."""
    import math_verify  # noqa: F401 - imported before the fork, so that each child has it

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that we bound its time ourselves
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, gold, answer, cpu_seconds), daemon=True)
    child.start()
    sender.close()
    try:
        return _await_verdict(receiver, child)
    finally:
        child.kill()
        child.join()
        receiver.close()


def _await_verdict(receiver: Connection, child: Any) -> Verdict | str:
    gold_read = False
    while receiver.poll(WALL_SECONDS):
        try:
            message = receiver.recv()
        except EOFError:
            child.join()
            out_of_cpu = child.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
            if gold_read and child.exitcode == -signal.SIGXCPU:
                return Verdict.TOO_COSTLY
            return "it took too much CPU time" if out_of_cpu else f"the process ended with {child.exitcode}"
        if message != GOLD_READ:
            return Verdict(message) if gold_read else str(message)
        gold_read = True
    return f"nothing came of it in {WALL_SECONDS:g} s"


def _child(sender: Connection, gold: str, answer: str, cpu_seconds: int) -> None:
    """Runs in the fork."""
    _limit_self(cpu_seconds)
    judge(sender.send, gold, answer)


def judge(send: Callable[[str], None], gold: str, answer: str) -> None:
    """Say `GOLD_READ` and then the verdict; what is said in the place of the first is why there is none."""
    try:
        expected = _parse(gold)
        if expected:
            _equal(expected, _parse("0"))
    except (MemoryError, RecursionError):
        send("it took too much memory")
        return
    if not expected:
        send("it could not be read")
        return
    send(GOLD_READ)
    try:
        given = _parse(answer)
        equal = _equal(expected, given)
    except (MemoryError, RecursionError):
        send(Verdict.TOO_COSTLY)
    else:
        send(Verdict.EQUAL if equal else Verdict.DIFFERENT if given else Verdict.UNREADABLE)


def _limit_self(cpu_seconds: int) -> None:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(spent.ru_utime + spent.ru_stime) + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.alarm(int(WALL_SECONDS))  # should the worker be killed, nobody else would end this process


def _equal(expected: list[Any], given: list[Any]) -> bool:
    from math_verify import verify

    return bool(verify(expected, given, timeout_seconds=None))


def _parse(latex: str) -> list[Any]:
    """The expressions in LaTeX; none when it cannot be read.

    Only LaTeX is read: math-verify's reader of plain expressions evaluates them as Python.
    """
    from math_verify import LatexExtractionConfig, parse

    text = latex.replace("$", " ").replace("\n", " ")
    return list(parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None))

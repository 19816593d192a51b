"""The process that compares answers: `python -m rollout_service.environments.builtin.math.worker`.

sympy may take forever, or all memory, on a model's answer (`9^{9^{9^{9}}}`), and nothing inside a process can stop it.
So each check runs in a fork of this process, which has spent two seconds on importing sympy, under the kernel's limits
of CPU time and memory.

Guarantee: a verdict is given only after the gold answer was parsed, and compared with 0, under the same limits. After
that, running out of CPU time or memory is the answer's doing and therefore a verdict; any other end of the process is a
failure and gives no score.

A request is a line of JSON, `[gold, answer, cpu_seconds]`, and so is its answer: a verdict, or why there is none. The
process ends with its standard input.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from math import isclose
from multiprocessing.connection import Connection
from typing import Any, Final

MEMORY_BYTES: Final = 2 * 1024**3
"""Address space of one check; the imports alone take about a quarter."""
WALL_SECONDS: Final = 60.0
"""For a check that hangs without using CPU time; high, since a loaded machine is slow to give any."""
GOLD_READ: Final = "gold read"
ROUNDED: Final = 0.02
"""Relative difference of numbers that may be one, rounded."""
_NUMERAL = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)\s*", re.ASCII)


class MathVerdict(StrEnum):
    EQUAL = "equal"
    DIFFERENT = "different"
    UNREADABLE = "unreadable"
    """The answer is not mathematics, or too long."""
    TOO_COSTLY = "too_costly"
    """Out of CPU time or memory."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may become an answer
    for line in sys.stdin:
        answers.write(json.dumps(compare_in_fork(*json.loads(line))) + "\n")
        answers.flush()


def compare_in_fork(gold: str, answer: str, cpu_seconds: int) -> MathVerdict | str:
    """Return the verdict, or why there is none. It forks, so only one thread may run."""
    _warm_up()
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


@cache
def _warm_up() -> None:
    """Import libraries and fill sympy's caches for all children: a check then costs a fifth."""
    # It would warn that its own time limit is off.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    judge(lambda _: None, r"2\sqrt{3}", r"\sqrt{12}")


def _await_verdict(receiver: Connection, child: Any) -> MathVerdict | str:
    gold_read = False
    while receiver.poll(WALL_SECONDS):
        try:
            message = receiver.recv()
        except EOFError:
            child.join()
            if child.exitcode == -signal.SIGXCPU:
                return MathVerdict.TOO_COSTLY if gold_read else "it took too much CPU time"
            return f"the process ended with {child.exitcode}"
        if message != GOLD_READ:
            return MathVerdict(message) if gold_read else str(message)
        gold_read = True
    return f"nothing came of it in {WALL_SECONDS:g} s"


def _child(sender: Connection, gold: str, answer: str, cpu_seconds: int) -> None:
    _limit_self(cpu_seconds)
    judge(sender.send, gold, answer)


def judge(send: Callable[[str], None], gold: str, answer: str) -> None:
    """Send `GOLD_READ` and then the verdict, or else only the reason why there is none."""
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
    if _equates_different_numbers(f"{gold}={answer}"):
        send(MathVerdict.DIFFERENT)
        return
    try:
        given = _parse(answer)
        equal = _equal(expected, given)
    except (MemoryError, RecursionError):
        send(MathVerdict.TOO_COSTLY)
    else:
        send(MathVerdict.EQUAL if equal else MathVerdict.DIFFERENT if given else MathVerdict.UNREADABLE)


def _equates_different_numbers(answer: str) -> bool:
    """Recognize an equation of numbers that differ, such as `41 = 42`.

    math-verify compares only its last side, and only six decimal places, at which small numbers are all 0. Rounded
    numbers are the same here, as in `0.333 = 0.33`.
    """
    sides = answer.replace("$", " ").split("=")
    numbers = [float(side) for side in sides if _NUMERAL.fullmatch(side)]
    return not all(isclose(number, numbers[-1], rel_tol=ROUNDED) for number in numbers)


def _limit_self(cpu_seconds: int) -> None:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(spent.ru_utime + spent.ru_stime) + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.alarm(int(WALL_SECONDS))  # ends this process if the worker is killed


def _equal(expected: list[Any], given: list[Any]) -> bool:
    from math_verify import verify

    return bool(verify(expected, given, timeout_seconds=None))


def _parse(latex: str) -> list[Any]:
    """Return none if it cannot be read.

    Only LaTeX is accepted: math-verify evaluates plain expressions as Python.
    """
    from math_verify import LatexExtractionConfig, parse

    text = latex.replace("$", " ").replace("\n", " ")
    return list(parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None))


if __name__ == "__main__":
    main()

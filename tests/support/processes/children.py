"""Helpers for children of a test: to kill them after a block, keep them uncollected, and find those that are left."""

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil

T = TypeVar("T", bound=subprocess.Popen[Any])
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
TRACER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
SEIZE = 0x4206
if libc.ptrace(SEIZE, int(sys.argv[1]), 0, 0) != 0:
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def killed(process: T) -> Iterator[T]:
    """Kill and collect a process at the end of the block, unless it has ended by then."""
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def started(code: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Python program with more environment, and wait for its first line."""
    command, environ = [sys.executable, "-c", code], {**os.environ, **env}
    with killed(subprocess.Popen(command, stdout=subprocess.PIPE, env=environ)) as process:
        process.stdout.readline()
        yield process


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Keep a process from being collected by its parent until the end of the block, as a busy kernel would.

    The block traces the process: if it is killed, it belongs to its tracer until the tracer releases it.
    """
    pipe = subprocess.PIPE
    with killed(subprocess.Popen([sys.executable, "-c", TRACER, str(pid)], stdin=pipe, stdout=pipe)) as tracer:
        assert tracer.stdout.readline() == b"held\n"
        yield


def children() -> set[int]:
    """Return the pids of this process's children, including dead ones that nobody has collected."""
    return {child.pid for child in psutil.Process().children()}


@contextmanager
def nothing_uncollected() -> Iterator[None]:
    """Fail if the block leaves a child, or a process object that garbage collection finds uncollected."""
    before = children()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    assert children() <= before

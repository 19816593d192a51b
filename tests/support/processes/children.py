"""Children of a test: ended with a block, held by the kernel for its length, and found where they were left."""

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil

T = TypeVar("T", bound=subprocess.Popen[Any])
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
    """Kill and collect a process when the block is left, unless it has ended by then."""
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Keep a process from being collected by its parent, as a busy kernel would, until the block is left.

    A process that is traced may be killed, and then belongs to its tracer until that lets it go.
    """
    pipe = subprocess.PIPE
    with killed(
        subprocess.Popen([sys.executable, "-c", TRACER, str(pid)], stdin=pipe, stdout=pipe)
    ) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == b"held\n"
        yield


def children() -> set[int]:
    """Return the numbers of this process's children, the dead ones that nobody collected among them."""
    return {child.pid for child in psutil.Process().children()}


@contextmanager
def nothing_uncollected() -> Iterator[None]:
    """Fail if the block leaves a child, or a process that garbage collection finds uncollected."""
    before = children()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    assert children() <= before

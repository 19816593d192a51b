"""The process that launchers are forked from, with Python started and their code loaded.

Each message on its standard input, a socket, asks for one launcher, and has its descriptors. A launcher is a child of
the service. This process ends with the socket.
"""

import ctypes
import fcntl
import gc
import json
import os
import shutil  # noqa: F401  snapshots need it, so that each fork has it loaded
import socket
import sys
from typing import NoReturn, TypedDict

from sandboxes.host.kernel_calls import SIGCHLD

from . import steps

MOST_BYTES, MOST_DESCRIPTORS = 1 << 18, 253
ANSWER_BYTES = 8
CLONE_PARENT = 0x8000
CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, -1)
"""The C library does not wrap clone(2) for processes; -1, which no call has, if unknown."""


class LaunchRequest(TypedDict):
    sandbox: str
    arguments: list[str]
    environ: dict[str, str]
    descriptors: list[int]


def main() -> None:
    """Serve requests. The argument names the variable that says whose process this is."""
    channel = socket.socket(fileno=0)
    if sys.stderr is None:  # the service has none either
        sys.stderr = open(os.dup2(1, 2), "w", buffering=1)  # noqa: SIM115  until the end
    gc.freeze()  # else a collection in a fork would copy all memory
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(channel, MOST_BYTES, MOST_DESCRIPTORS)
        except ConnectionResetError:  # the service was killed, and has not read an answer
            return
        if not message:
            return
        try:
            forked = fork_sibling()
        except OSError as error:
            send_answer(channel, -(error.errno or 1))
        else:
            if forked == 0:
                run_launcher(channel, json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def fork_sibling() -> int:
    """Fork another child of this process's parent; return its pid, and 0 in the child."""
    # PyDLL keeps the interpreter's lock, so that the child has it. There are no other threads.
    pid: int = ctypes.PyDLL(None, use_errno=True).syscall(CLONE, CLONE_PARENT | SIGCHLD, None, None, None, None)
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def run_launcher(channel: socket.socket, request: LaunchRequest, descriptors: list[int]) -> NoReturn:
    """Answer from the launcher itself, so that none lives without the service knowing it."""
    try:
        os.setsid()
        show_variable(sys.argv[1], request["sandbox"])
        send_answer(channel, os.getpid())
        channel.detach()
        move_descriptors(descriptors, request["descriptors"])
        sys.stderr.write(steps.launch(request["environ"], request["arguments"]))
    except Exception as error:  # noqa: BLE001  of whatever kind, it is one line of the report
        sys.stderr.write(f"launch: {type(error).__name__}: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(1)


def send_answer(channel: socket.socket, answer: int) -> None:
    channel.send(answer.to_bytes(ANSWER_BYTES, sys.byteorder, signed=True))


def move_descriptors(descriptors: list[int], numbers: list[int]) -> None:
    above = 1 + max(*descriptors, *numbers)
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    os.closerange(0, above)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)


def show_variable(name: str, value: str) -> None:
    """Change a variable where this process was given it, which is what others see in /proc."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    room = len(os.environ[name])
    ctypes.memmove(libc.getenv(name.encode()), value.encode().ljust(room, b"\0"), room)

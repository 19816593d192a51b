"""Kernel calls that Python lacks; their OSErrors name the call."""

import ctypes
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# From linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h and linux/seccomp.h.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 24, 22, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, 0)

libc = ctypes.CDLL(None, use_errno=True)


class BpfProgram(ctypes.Structure):
    """`struct sock_fprog` of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def call(name: str, *arguments: "Any") -> int:
    """Call a function of the C library; a negative result raises OSError from errno."""
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: "str | None", flags: int, options: str = "") -> None:
    try:
        call(
            "mount",
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            options.encode(),
        )
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({kind or 'bind'} at {target})") from error


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def change_root(path: str) -> None:
    """Make a folder that is a mount the root, and let go of everything else."""
    os.chdir(path)
    call("syscall", PIVOT_ROOT, b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def end_with_parent() -> None:
    """Let the kernel end this process when its parent ends. A change of user undoes it, so it comes after."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def keep_capabilities(kept: "frozenset[int]") -> None:
    """Give up all other capabilities for programs that are started from now on."""
    for capability in range(64):
        if capability not in kept and libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break


def filter_calls(program: bytes) -> None:
    """Let a classic BPF program decide on the calls of this process and all that it starts."""
    told = BpfProgram(len(program) // 8, program)
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(told), 0, 0)

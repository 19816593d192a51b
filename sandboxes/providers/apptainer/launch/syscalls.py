"""System calls that neither Python nor the C library wraps, and those that raise from `errno`."""

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# From linux/sched.h, linux/mount.h and linux/prctl.h.
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
CLONE_NEWIPC, CLONE_NEWPID = 0x08000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_IDMAP = 1, 2, 4, 0x00100000
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 24, 38, 47
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW = 1, 4
KEYCTL, SECCOMP = {"x86_64": (250, 317), "aarch64": (219, 277)}.get(os.uname().machine, (0, 0))
"""Numbers of calls that the C library does not wrap; 0 if unknown."""
SIGCHLD = 17

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: "Any") -> int:
    """Call a function of the C library; a negative result raises OSError from errno."""
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode(),
    )


class MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "namespace"))


def set_mount_attributes(tree: int, path: str, attributes: int, namespace: int = 0) -> None:
    """Add attributes to mounts at a path below `tree`, or at `tree` itself if the path is empty."""
    told = MountAttributes(attributes, 0, 0, namespace)
    flags = AT_RECURSIVE | (0 if path else AT_EMPTY_PATH)
    call("syscall", MOUNT_SETATTR, tree, os.fsencode(path), flags, ctypes.byref(told), ctypes.sizeof(told))


class FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def set_filter(program: bytes) -> None:
    """Filter the system calls of this process and all that it starts."""
    told = FilterProgram(len(program) // 8, program)
    call("syscall", SECCOMP, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, ctypes.byref(told))


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)

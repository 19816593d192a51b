"""Kernel calls that Python lacks, whose OSErrors name the call, for programs of this project that run alone.

Such a program is started by `alone`. It imports from this project only modules that import nothing else of it, since
all other packages would take longer to load than the program runs.
"""

import ctypes
import fcntl
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# From linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h, linux/seccomp.h, linux/sockios.h and linux/if.h.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_IDMAP = 1, 2, 4, 0x00100000
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
SECCOMP_MODE_FILTER, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW = 2, 1, 4
KEYCTL, SECCOMP = {"x86_64": (250, 317), "aarch64": (219, 277)}.get(os.uname().machine, (0, 0))
"""Numbers of calls that the C library does not wrap; 0 if unknown."""
SIOCSIFFLAGS, IFF_UP, IFREQ_SIZE, NAME_SIZE = 0x8914, 1, 40, 16
AF_INET, SOCK_DGRAM = 2, 2
SIGKILL, SIGCHLD = 9, 17
LINKS = 40
"""Symbolic links that the kernel follows in one path."""
ELOOP = 40

libc = ctypes.CDLL(None, use_errno=True)


def alone(module: str) -> "list[str]":
    """Return a command that runs the `main` of a module with no other package of this project but those above it."""
    package, _, _ = __name__.partition(".")
    folder = os.path.dirname(os.path.dirname(__file__))
    stub = f"import sys; sys.modules[{package!r}] = top = type(sys)({package!r}); top.__path__ = [{folder!r}]"
    return [sys.executable, "-I", "-S", "-c", f"{stub}; from {module} import main; main()"]


def call(name: str, *arguments: "Any") -> int:
    """Call a function of the C library; a negative result raises OSError from errno."""
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


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


class MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "namespace"))


def set_mount_attributes(tree: int, path: str, attributes: int, namespace: int = 0) -> None:
    """Add attributes to mounts at a path below `tree`, or at `tree` itself if the path is empty."""
    told = MountAttributes(attributes, 0, 0, namespace)
    flags = AT_RECURSIVE | (0 if path else AT_EMPTY_PATH)
    call("syscall", MOUNT_SETATTR, tree, os.fsencode(path), flags, ctypes.byref(told), ctypes.sizeof(told))


def change_root(path: str) -> None:
    """Make a folder that is a mount the root, and let go of everything else."""
    os.chdir(path)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)  # the old root, which lies on the new one
    os.chdir("/")


def find_inside(root: str, path: str) -> str:
    """Return the host's path of a path that need not exist; links are followed within `root`."""
    todo, done, links = path.split("/")[::-1], "", 0
    while todo:
        part = todo.pop()
        if part in {"", "."}:
            continue
        if part == "..":
            done = done.rpartition("/")[0]
            continue
        try:
            target = os.readlink(f"{root}{done}/{part}")
        except OSError:  # it is not a link, or does not exist
            done += f"/{part}"
            continue
        links += 1
        if links > LINKS:
            raise OSError(ELOOP, os.strerror(ELOOP), path)
        todo += target.split("/")[::-1]
        done = "" if target.startswith("/") else done
    return root + done


def end_with_parent() -> None:
    """Let the kernel end this process when its parent ends. A change of user undoes it, so it comes after."""
    call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def keep_capabilities(kept: "frozenset[int]") -> None:
    """Give up all other capabilities for programs that are started from now on."""
    for capability in range(64):
        if capability not in kept and libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # the kernel has no more


class FilterProgram(ctypes.Structure):
    """`struct sock_fprog` of linux/filter.h: a classic BPF program."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    @classmethod
    def of(cls, program: bytes) -> "FilterProgram":
        return cls(len(program) // 8, program)


def set_filter(program: bytes) -> None:
    """Filter the system calls of this process and all that it starts."""
    told = FilterProgram.of(program)
    call("syscall", SECCOMP, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, ctypes.byref(told))


def raise_loopback() -> None:
    """Without Python's sockets, which take long to load."""
    fd = call("socket", AF_INET, SOCK_DGRAM, 0)
    request = b"lo".ljust(NAME_SIZE, b"\0") + IFF_UP.to_bytes(2, sys.byteorder)
    fcntl.ioctl(fd, SIOCSIFFLAGS, request.ljust(IFREQ_SIZE, b"\0"))
    os.close(fd)


def enter_user_namespace(others: int, map_ids: "Callable[[int], int]") -> None:
    """Enter a user namespace and others. A child, which stays outside, calls `map_ids` with the number of this process.

    That returns 0 if it succeeded.
    """
    me = os.getpid()
    wait, ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready)
        status = 1
        try:
            if os.read(wait, 1):
                status = map_ids(me)
        finally:
            os._exit(status)
    os.close(wait)
    try:
        call("unshare", CLONE_NEWUSER | others)
        os.write(ready, b"x")
    finally:
        os.close(ready)
        _, status = os.waitpid(child, 0)
    if status:
        raise OSError("the ids of the user namespace could not be mapped")


def map_subordinate_ids(process: int, users: str, groups: str) -> int:
    """Make this user root in the namespace of a process, and its subordinate ids all others, by the host's programs.

    Returns a status that is 0 if both succeeded.
    """
    for program, own, given in (("newuidmap", os.geteuid(), users), ("newgidmap", os.getegid(), groups)):
        command = [program, str(process), "0", str(own), "1", "1", *given.split()]
        if os.spawnvp(os.P_WAIT, program, command):  # noqa: S606
            return 1
    return 0

"""The user namespace of a step, with its ids, and the other attributes that make a process root in it."""

import fcntl
import os
import socket
import sys

from .kernel import CLONE_NEWUSER, call, end_with_parent, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIOCSIFFLAGS, IFF_UP = 0x8914, 1  # from linux/sockios.h and linux/if.h


def enter_namespaces(ids: "dict[str, Any]", others: int) -> None:
    """Enter a user namespace and others.

    A child, which stays outside, maps the ids: by this process's user if that is root, else by the host's setuid
    programs.
    """
    me = os.getpid()
    user, group = os.geteuid(), os.getegid()
    wait, ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready)
        status = 1
        try:
            if os.read(wait, 1):
                status = _map_ids(me, ids, user, group)
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
        raise OSError("the ids of the namespace could not be mapped")


def _map_ids(process: int, ids: "dict[str, Any]", user: int, group: int) -> int:
    """Return a status that is 0 if that succeeded."""
    if ids["kind"] == "subordinate":
        for program, own, given in (("newuidmap", user, ids["users"]), ("newgidmap", group, ids["groups"])):
            command = [program, str(process), "0", str(own), "1", "1", *given.split()]
            if os.spawnvp(os.P_WAIT, program, command):  # noqa: S606
                return 1
        return 0
    if ids["kind"] == "single":
        write(f"/proc/{process}/setgroups", "deny")
        users, groups = f"{user} 1", f"{group} 1"
    else:
        users, groups = ids["users"], ids["groups"]
    write(f"/proc/{process}/uid_map", f"0 {users}")
    write(f"/proc/{process}/gid_map", f"0 {groups}")
    return 0


def become_root(parent: int, *, groups: bool) -> None:
    """Become root of the namespace, and end with the parent; `groups` says whether this process may leave its own."""
    if groups:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    end_with_parent()
    if os.getppid() not in {parent, 0}:
        os._exit(1)


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = b"lo".ljust(16, b"\0") + IFF_UP.to_bytes(2, sys.byteorder)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request.ljust(40, b"\0"))

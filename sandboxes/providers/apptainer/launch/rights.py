"""The ids, rights and limits of a sandbox's processes: its user namespaces, and what the launcher gives up."""

import os
import resource

from sandboxes.host.kernel_calls import (
    CLONE_NEWUSER,
    KEYCTL,
    PR_SET_DUMPABLE,
    call,
    enter_user_namespace,
    libc,
    map_subordinate_ids,
    write,
)

ALL_IDS = (1 << 32) - 1
KEYCTL_JOIN_SESSION_KEYRING = 1
LIMITS = {
    resource.RLIMIT_NOFILE: 4096,
    resource.RLIMIT_SIGPENDING: 4096,
    resource.RLIMIT_MSGQUEUE: 1 << 20,
    resource.RLIMIT_MEMLOCK: 8 << 20,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_RTPRIO: 0,
    resource.RLIMIT_NICE: 0,
}
"""For each process, of resources that the kernel counts per user or a process can multiply. They are never above the
host's. No process dumps core, since the host's handler could store it on the host's disk, and none gains priority over
others.
"""


def new_user_namespace(others: int, user: int, group: int, inside: int) -> None:
    """Enter the namespaces `others`, and one whose only user is this one, as `inside`."""
    call("unshare", CLONE_NEWUSER | others)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{inside} {user} 1")
    write("/proc/self/gid_map", f"{group} {group} 1")


def new_root_namespace(others: int, users: str, groups: str) -> None:
    """Enter the namespaces `others` and one in which this user is root and its subordinate ids are all other users."""
    enter_user_namespace(others, lambda process: map_subordinate_ids(process, users, groups))
    os.setgroups([])


def drop_root(user: int, group: int) -> None:
    """Drop root for good. Without "dumpable" the kernel would keep the files in /proc/self owned by root."""
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)


def allow_user_namespaces(count: int) -> None:
    """Allow only so many user namespaces below this one: Apptainer's own, if it makes one.

    If /proc/sys is not writable, code inside can make others, which give no rights outside.
    """
    try:
        write("/proc/sys/user/max_user_namespaces", str(count))
    except OSError:
        return


def set_limits() -> None:
    """Set the limits for good, in the new user namespace: counts of the host's namespace stay as they were."""
    for what, most in LIMITS.items():
        _, hard = resource.getrlimit(what)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (least, least))


def leave_keyring() -> None:
    """Replace the service's session keyring by an empty one. If that fails, the filter still blocks all keys."""
    if KEYCTL:
        libc.syscall(KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None)


def swap_ids(owner: int, user: int) -> str:
    """Return a map in which `owner` is `user`, nobody is `owner`, and all others are themselves."""
    low, high = sorted((owner, user))
    spans = ((0, low), (low + 1, high), (high + 1, ALL_IDS))
    lines = [f"{start} {start} {end - start}" for start, end in spans if end > start]
    return "\n".join([*lines, f"{owner} {user} 1"])


def make_id_mapping(owner: int, user: int) -> int:
    """Return a user namespace that maps `owner` to `user`, and all others to themselves."""
    ready, made = os.pipe()
    wait, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        try:
            call("unshare", CLONE_NEWUSER)
            os.write(made, b"x")
        finally:
            os.close(made)
            os.read(wait, 1)
            os._exit(0)
    os.close(made)
    os.close(wait)
    try:
        if not os.read(ready, 1):
            raise OSError("no user namespace could be made")
        write(f"/proc/{child}/uid_map", swap_ids(owner, user))
        write(f"/proc/{child}/gid_map", f"0 0 {ALL_IDS}")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(end)
        os.close(ready)
        os.waitpid(child, 0)

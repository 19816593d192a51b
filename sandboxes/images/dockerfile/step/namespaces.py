"""The user namespace of a step, with its ids, and the other attributes that make a process root in it."""

import os

from sandboxes.host.kernel_calls import end_with_parent, enter_user_namespace, map_subordinate_ids, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def enter_namespaces(ids: "dict[str, Any]", others: int) -> None:
    """Enter a user namespace and others.

    The ids are mapped by this process's user if that is root, else by the host's setuid programs.
    """
    user, group = os.geteuid(), os.getegid()

    def map_ids(process: int) -> int:
        if ids["kind"] == "subordinate":
            return map_subordinate_ids(process, ids["users"], ids["groups"])
        if ids["kind"] == "single":
            write(f"/proc/{process}/setgroups", "deny")
            users, groups = f"{user} 1", f"{group} 1"
        else:
            users, groups = ids["users"], ids["groups"]
        write(f"/proc/{process}/uid_map", f"0 {users}")
        write(f"/proc/{process}/gid_map", f"0 {groups}")
        return 0

    enter_user_namespace(others, map_ids)


def become_root(parent: int, *, groups: bool) -> None:
    """Become root of the namespace, and end with the parent; `groups` says whether this process may leave its own."""
    if groups:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    end_with_parent()
    if os.getppid() not in {parent, 0}:
        os._exit(1)

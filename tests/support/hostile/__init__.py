"""Code that attacks its sandbox, as checks that any runner can call: the tests as root, or any user as a program.

    python -m tests.support.hostile --list
    python -m tests.support.users.as_user -- python -m tests.support.hostile fork_bomb

A check takes a provider of real sandboxes and asserts three things. The attacker's caller is told what happened, by a
typed error that names the limit if there is one. A neighbor works as before. When both are closed, no process, mount,
control group, or folder is left. Nothing waits for a fixed time for something to happen.
"""

from tests.support.hostile import kernel
from tests.support.hostile.checks import CHECKS, NOTHING, NothingToAttackError

__all__ = ["CHECKS", "NOTHING", "NothingToAttackError", "kernel"]

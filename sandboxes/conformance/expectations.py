"""The type of a check, and the functions that state its expectations."""

from collections.abc import Awaitable, Callable
from functools import wraps
from inspect import iscoroutinefunction
from types import ModuleType
from typing import TypeVar

import anyio

from sandboxes.contract import BashResult, BashSession, PythonResult, PythonSession, Sandbox, SandboxProvider
from sandboxes.errors import SandboxError

T = TypeVar("T")

Check = Callable[[Sandbox, SandboxProvider], Awaitable[None]]
"""A check gets a fresh sandbox that nothing else uses, and its provider; its docstring is the contract's promise."""

GRACE = 12.0
"""Seconds after its timeout in which a call must return."""

WRITE = r"""
mkdir -p kept/deep shut gone && rmdir gone && echo first >kept/file && ln kept/file kept/hard && ln -s file kept/link
chmod 4640 kept/file; chmod 2750 kept/deep; touch -d @1000000000.5 kept/old; printf 'a\0b' >"$(printf 'new\nline\377')"
mkfifo kept/pipe; echo secret >shut/file; chmod 000 shut/file; chmod 0500 shut; truncate -s 1M kept/sparse
"""
LOOK = r"""
find . -printf '%P %y %m %n %s %l %T@\n' | sort; cat kept/hard new*
"""
OPEN = r"""
chmod 0700 shut; chmod 0600 shut/file; cat shut/file
"""
IMAGE_CHANGES = r"""
set -e
folder=$(find /usr/share /usr/lib -mindepth 1 -maxdepth 1 -type d ! -name 'lib*' ! -name python3 | sort | head -n 1)
rm -r "$folder"; echo "$folder"
"""

ALIKE = r"""
id; umask; ulimit -a | grep -v processes; pwd; env | sort | grep -v -e ^_= -e ROLLOUT_SANDBOX
grep -e Cap -e NoNewPrivs -e Seccomp: /proc/self/status; cat /proc/self/uid_map /proc/self/gid_map
awk '{ gsub(/(lowerdir|size|nr_inodes|uid)=[^,]*/, "", $4); print $2, $3, $4 }' /proc/mounts | sort
ls /dev /proc/sys/user; cut -d: -f1 /proc/net/dev; cat /proc/1/comm; stat -c '%A %U %G %n' / /tmp /dev/shm
"""
"""Prints the walls around code inside."""
ATTACKS = "unshare --user true; mount -t tmpfs none /mnt; mknod device c 1 3; kill -0 1\n"
"""Runs into the walls. Without isolation it would change the host."""


def checks_in(module: ModuleType) -> tuple[Check, ...]:
    """Return the checks of a module, in their order: all of its own coroutines without an underscore.

    One named `_is_possible` says where they can be run; elsewhere it is the check.
    """
    own = (one for one in vars(module).values() if iscoroutinefunction(one) and one.__module__ == module.__name__)
    checks = tuple(one for one in own if not one.__name__.startswith("_"))
    possible = getattr(module, "_is_possible", None)
    return checks if possible is None else tuple(_where(possible, check) for check in checks)


def _where(possible: Callable[[Sandbox, SandboxProvider], Awaitable[bool]], check: Check) -> Check:
    @wraps(check)
    async def checked(sandbox: Sandbox, provider: SandboxProvider) -> None:
        if await possible(sandbox, provider):
            await check(sandbox, provider)

    return checked


class ConformanceError(AssertionError):
    """A provider breaks the contract; the message says how."""


def expect(holds: bool, found: object) -> None:
    """
    Raises:
        ConformanceError: The condition does not hold.
    """
    if not holds:
        raise ConformanceError(f"found {found!r}")


def expect_cut(result: BashResult | PythonResult, limit: int) -> None:
    """Expect that the output, euro signs alone, was cut between two of them at this limit."""
    head, _note, tail = result.output.partition("\n[")
    tail = tail.partition("]\n")[2]
    expect(result.truncated and set(head) == set(tail) == {"€"}, (limit, result))


async def expect_error(kind: type[SandboxError], call: Awaitable[object]) -> SandboxError:
    """Return the error that the call must raise.

    Raises:
        ConformanceError: The call does not fail.
    """
    try:
        found = await call
    except kind as error:
        return error
    raise ConformanceError(f"no {kind.__name__}, but {found!r}")


async def interrupted(sandbox: Sandbox, session: BashSession | PythonSession, call: Awaitable[T]) -> T:
    """Interrupt the call once it has made the file `running`; return its result."""
    async with anyio.create_task_group() as tasks:

        async def interrupt_soon() -> None:
            while (await sandbox.exec(["rm", "running"])).exit_code != 0:
                pass
            await session.interrupt()

        tasks.start_soon(interrupt_soon)
        result = await call
    return result  # noqa: RET504  mypy: a task group may swallow what is raised in it


async def said(sandbox: Sandbox, script: str) -> str:
    done = await sandbox.exec(["bash", "-c", script])
    return done.stdout.decode(errors="surrogateescape") + done.stderr.decode()


async def write_files(sandbox: Sandbox, provider: SandboxProvider) -> str:
    """Write files that `LOOK` describes, and remove a folder of the image; return its path.

    Without isolation, the image's files are those of the host, so nothing is removed.
    """
    return (await said(sandbox, WRITE + (IMAGE_CHANGES if provider.isolates else ""))).strip()


async def walls(sandbox: Sandbox, provider: SandboxProvider) -> str:
    return await said(sandbox, ALIKE + (ATTACKS if provider.isolates else ""))


async def expect_walls(sandbox: Sandbox, provider: SandboxProvider, plain: str) -> None:
    """Expect that the sandbox has the walls of a plain one, and that its sessions work."""
    different = set((await walls(sandbox, provider)).splitlines()) ^ set(plain.splitlines())
    expect(not different, sorted(different))
    bash, python = await sandbox.bash(), await sandbox.python()
    expect((await bash.run("echo $((6*7))")).output == "42\n", "bash")
    expect((await python.execute("6*7")).result == "42", "python")

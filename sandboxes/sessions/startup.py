"""Open sessions ahead of their first use."""

import shlex
from collections.abc import Iterable

from sandboxes.contract import Sandbox, SessionName
from sandboxes.errors import FileMissingError
from sandboxes.task_groups import open_task_group


async def open_sessions(sandbox: Sandbox, names: Iterable[SessionName]) -> None:
    """Open the named sessions concurrently. Sessions that are open stay as they are.

    Raises:
        SandboxStartError: A session did not start.
        SandboxClosedError: The sandbox is closed or has ended.
    """
    async with open_task_group() as tasks:
        for name in names:
            tasks.start_soon(_open, sandbox, name, name=f"open {name} of {sandbox.id}")


async def _open(sandbox: Sandbox, name: SessionName) -> None:
    if name == "bash":
        await sandbox.bash()
    else:
        await sandbox.python()


async def return_to_workdir(sandbox: Sandbox, names: Iterable[SessionName]) -> None:
    """Make these sessions enter the working folder again, in case it was replaced after they were opened.

    Raises:
        FileMissingError: The folder no longer exists.
        SandboxStartError: A session was not open, and did not start.
        SandboxClosedError: The sandbox is closed or has ended.
        SessionDiedError: A session has ended.
    """
    entered = await sandbox.exec(["bash", "-c", 'cd -- "$1"', "enter", sandbox.workdir], cwd="/")
    if entered.exit_code != 0:
        raise FileMissingError(f"cannot enter the working folder: {entered.stderr.decode(errors='replace')}")
    for name in sorted(names):
        if name == "bash":
            await (await sandbox.bash()).run(f"cd -- {shlex.quote(sandbox.workdir)}")
        else:
            await (await sandbox.python()).execute(f"__import__('os').chdir({sandbox.workdir!r})")

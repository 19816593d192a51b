"""Sessions that are opened ahead of their first use."""

import shlex
from collections.abc import Iterable

from sandboxes.contract import Sandbox, SessionName
from sandboxes.errors import FileMissingError
from sandboxes.task_groups import open_task_group


async def open_sessions(sandbox: Sandbox, names: Iterable[SessionName]) -> None:
    """Open the sessions of these names at once; those that are open stay as they are.

    Raises:
        SandboxStartError: one did not come up.
        SandboxClosedError: the sandbox is closed or has ended.
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
    """Have these sessions enter the working folder again, which something may have replaced since they were opened.

    Raises:
        FileMissingError: there is no such folder any more.
        SandboxStartError: a session was not open, and did not come up.
        SandboxClosedError: the sandbox is closed or has ended.
        SessionDiedError: a session has ended.
    """
    entered = await sandbox.exec(["bash", "-c", 'cd -- "$1"', "enter", sandbox.workdir], cwd="/")
    if entered.exit_code != 0:
        raise FileMissingError(
            f"the working folder cannot be entered: {entered.stderr.decode(errors='replace')}"
        )
    for name in sorted(names):
        if name == "bash":
            await (await sandbox.bash()).run(f"cd -- {shlex.quote(sandbox.workdir)}")
        else:
            await (await sandbox.python()).execute(f"__import__('os').chdir({sandbox.workdir!r})")

"""A sandbox as a grader sees it, which is told when the grader's files are there and its first program would begin."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from typing import Any

from sandboxes import BashSession, ExecResult, PythonSession, Sandbox


class GradersSandbox:
    """Calls `begin` with the variables of the first program that runs after files were copied in.

    Everything else is the sandbox's own.
    """

    def __init__(self, sandbox: Sandbox, begin: Callable[[Mapping[str, str]], Awaitable[None]]) -> None:
        self._sandbox = sandbox
        self._begin = begin
        self._has_files = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def import_path(self, parent: str, tar: AsyncIterable[bytes]) -> None:
        """Copy files in."""
        await self._sandbox.import_path(parent, tar)
        self._has_files = True

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Write a file."""
        await self._sandbox.write_file(path, data)
        self._has_files = True

    async def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> ExecResult:
        """Run a program."""
        await self._note(env or {})
        return await self._sandbox.exec(argv, env=env, **options)

    async def bash(self) -> BashSession:
        """Return the session of bash."""
        await self._note({})
        return await self._sandbox.bash()

    async def python(self) -> PythonSession:
        """Return the session of Python."""
        await self._note({})
        return await self._sandbox.python()

    async def _note(self, env: Mapping[str, str]) -> None:
        if self._has_files:
            await self._begin(env)

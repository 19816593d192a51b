"""Helpers for tools that work in the agent's sandbox. They turn a mistake of the policy into a text for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rollout_service.agents.tool_calling.tools import ToolContext
from rollout_service.agents.turns import ToolInputError
from rollout_service.episodes import require_sandbox
from sandboxes import ExecResult
from sandboxes.errors import SandboxFileError


@contextmanager
def file_errors(path: str) -> Iterator[None]:
    """Report a file that cannot be used to the policy, as a ToolInputError."""
    refuse_nul(path, "path")
    try:
        yield
    except SandboxFileError as error:
        raise ToolInputError(f"{error}; {error.hint}" if error.hint else str(error)) from error


def refuse_nul(text: str, name: str) -> None:
    """Refuse a text that no program can take as an argument.

    Raises:
        ToolInputError: The text holds a NUL character; the message names the argument.
    """
    if "\0" in text:
        raise ToolInputError(f"{name} holds a NUL character")


async def run_script(
    script: str, arguments: Sequence[str], context: ToolContext, *, limit: int
) -> ExecResult:
    """Run a bash script of ours in the agent's sandbox; its arguments are never part of the script."""
    argv = ["bash", "--norc", "-c", script, "tool", *arguments]
    result = await require_sandbox(context.sandbox).exec(argv, timeout=context.seconds, output_limit=limit)
    context.limit_violations.extend(one for one in result.limit_violations if not one.is_of_call)
    return result

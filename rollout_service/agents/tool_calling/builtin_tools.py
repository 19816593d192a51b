"""The built-in tools: `bash`, `python`, `read`, `write`, `edit` and `finish`.

A result is the output of the command or the code without its last newline, followed by notes in square brackets: a
nonzero exit code, a time limit that was reached, missing output. Guarantees: the whole is no longer than the
environment's limit, and no note is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pydantic import ConfigDict

from rollout_service.agents.errors import ToolInputError
from rollout_service.agents.tool_calling.text import MIN_LIMIT, cut_middle
from rollout_service.agents.tool_calling.tools import (
    Arguments,
    FunctionTool,
    Tool,
    ToolContext,
    ToolResult,
    by_name,
)
from rollout_service.episodes import require_sandbox
from rollout_service.errors import ConfigurationError, did_you_mean
from sandboxes import BashResult, PythonResult
from sandboxes.errors import LimitExceededError, SandboxFileError, SessionDiedError

NO_OUTPUT = "[no output]"


class _Bash(Arguments):
    command: str


class _Python(Arguments):
    code: str


class _Read(Arguments):
    path: str


class _Write(Arguments):
    path: str
    content: str


class _Edit(Arguments):
    path: str
    old: str
    new: str


class _Finish(Arguments):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    answer: str = ""


async def _bash(arguments: _Bash, context: ToolContext) -> str:
    _refuse_nul(arguments.command, "command")
    try:
        session = await require_sandbox(context.sandbox).bash()
        result = await session.run(arguments.command, timeout=context.seconds)
    except (SessionDiedError, LimitExceededError) as error:
        return _died("shell", error, context)
    context.limit_violations.extend(result.limit_violations)
    notes = _notes(result, context.seconds)
    if result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    return _text(result.output, notes, context.output_chars)


async def _python(arguments: _Python, context: ToolContext) -> str:
    try:
        session = await require_sandbox(context.sandbox).python()
        result = await session.execute(arguments.code, timeout=context.seconds)
    except (SessionDiedError, LimitExceededError) as error:
        return _died("Python", error, context)
    context.limit_violations.extend(result.limit_violations)
    # IPython begins with a line of dashes, which says nothing.
    traceback = result.error.traceback.lstrip("-").lstrip() if result.error and not result.timed_out else None
    parts = [result.output.removesuffix("\n"), result.result, traceback]
    output = "\n".join(part for part in parts if part)
    return _text(output, _notes(result, context.seconds), context.output_chars)


async def _read(arguments: _Read, context: ToolContext) -> str:
    with _file_errors(arguments.path):
        content = await require_sandbox(context.sandbox).read_file(arguments.path)
    return _text(content.decode(errors="replace"), [], context.output_chars)


async def _write(arguments: _Write, context: ToolContext) -> str:
    with _file_errors(arguments.path):
        await require_sandbox(context.sandbox).write_file(arguments.path, arguments.content)
    return f"wrote {arguments.path}"


async def _edit(arguments: _Edit, context: ToolContext) -> str:
    with _file_errors(arguments.path):
        await require_sandbox(context.sandbox).edit_file(arguments.path, arguments.old, arguments.new)
    return f"edited {arguments.path}"


async def _finish(arguments: _Finish, context: ToolContext) -> ToolResult:  # noqa: ARG001
    return ToolResult(text="", answer=arguments.answer)


BASH = FunctionTool("bash", "Run a command in a persistent shell.", _Bash, _bash)
PYTHON = FunctionTool("python", "Run code.", _Python, _python)
READ = FunctionTool("read", "Read a file.", _Read, _read, parallel=True)
WRITE = FunctionTool("write", "Write a file.", _Write, _write)
EDIT = FunctionTool("edit", "Replace a text that occurs once in a file.", _Edit, _edit)
FINISH = FunctionTool("finish", "End the task with your answer.", _Finish, _finish)

BUILTIN_TOOLS: tuple[Tool, ...] = (BASH, PYTHON, READ, WRITE, EDIT, FINISH)
NEEDS_SANDBOX = frozenset(tool.name for tool in BUILTIN_TOOLS) - {FINISH.name}


def builtin_tools(names: Iterable[str]) -> list[Tool]:
    """Return the built-in tools of these names.

    Raises:
        ConfigurationError: A name is unknown.
    """
    known = by_name(BUILTIN_TOOLS)
    tools = []
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"there is no built-in tool {name!r}{did_you_mean(name, known)}",
                hint=f"The built-in tools are {', '.join(known)}.",
            )
        tools.append(known[name])
    return tools


@contextmanager
def _file_errors(path: str) -> Iterator[None]:
    """Report a file that cannot be used to the policy, as a ToolInputError."""
    _refuse_nul(path, "path")
    try:
        yield
    except SandboxFileError as error:
        raise ToolInputError(f"{error}; {error.hint}" if error.hint else str(error)) from error


def _refuse_nul(text: str, name: str) -> None:
    if "\0" in text:
        raise ToolInputError(f"{name} holds a NUL character")


def _died(what: str, error: SessionDiedError | LimitExceededError, context: ToolContext) -> str:
    """Describe a session that the policy's own code ended, or keeps from starting: its output and the cause."""
    if isinstance(error, LimitExceededError):
        if error.limit == "lifetime":
            raise error  # the sandbox has ended, so no later call can work
        context.limit_violations.append(error)
    note = f"[{what} was restarted, its state is lost: {cut_middle(str(error), MIN_LIMIT * 2)}]"
    return _text(error.output, [note], context.output_chars)


def _notes(result: BashResult | PythonResult, seconds: float) -> list[str]:
    notes = []
    if result.truncated:
        notes.append("[part of the output was dropped: there was too much]")
    if result.timed_out:
        notes.append(f"[stopped: it took longer than {seconds:g} s]")
    notes += [
        f"[{violation}]" for violation in result.limit_violations if violation.limit not in {"output", "time"}
    ]
    return notes


def _text(output: str, notes: list[str], limit: int) -> str:
    """Return the output and the notes; the output is cut if necessary, the notes never."""
    tail = "\n".join(notes)
    output = output.removesuffix("\n")
    if not output:
        return tail or NO_OUTPUT
    room = limit - len(tail) - 1 if tail else limit
    output = cut_middle(output, max(room, MIN_LIMIT))
    return f"{output}\n{tail}" if tail else output

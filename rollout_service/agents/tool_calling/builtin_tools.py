"""The built-in tools, by name. The sessions, single files and the end are here; the others have modules of their own.

A result is the output without its last newline, followed by notes in square brackets: a nonzero exit code, a reached
time limit, missing output. The whole is within the environment's limit, and no note is cut.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ConfigDict, Field

from rollout_service.agents.tool_calling.editor import EDITOR
from rollout_service.agents.tool_calling.tools import (
    MIN_LIMIT,
    Arguments,
    FunctionTool,
    Tool,
    ToolContext,
    ToolInputError,
    ToolResult,
    by_name,
    cut_middle,
    file_errors,
    refuse_nul,
    run_script,
    with_notes,
)
from rollout_service.agents.web.browse import BROWSE
from rollout_service.base.errors import ConfigurationError, did_you_mean
from rollout_service.episodes import require_sandbox
from sandboxes import BashResult, ExecResult, PythonResult
from sandboxes.errors import LimitExceededError, SessionDiedError


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


class _Think(Arguments):
    thought: str


class _Finish(Arguments):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    answer: str = ""


async def _bash(arguments: _Bash, context: ToolContext) -> ToolResult:
    refuse_nul(arguments.command, "command")
    try:
        session = await require_sandbox(context.sandbox).bash()
        result = await session.run(arguments.command, timeout=context.seconds)
    except (SessionDiedError, LimitExceededError) as error:
        return _died("shell", error, context)
    context.limit_violations.extend(result.limit_violations)
    notes = _notes(result, context.seconds)
    if result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    text = with_notes(result.output, notes, context.output_chars)
    return ToolResult(text, failed=result.timed_out or bool(result.exit_code))


async def _python(arguments: _Python, context: ToolContext) -> ToolResult:
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
    text = with_notes(output, _notes(result, context.seconds), context.output_chars)
    return ToolResult(text, failed=result.timed_out or result.error is not None)


async def _read(arguments: _Read, context: ToolContext) -> str:
    with file_errors(arguments.path):
        content = await require_sandbox(context.sandbox).read_file(arguments.path)
    return with_notes(content.decode(errors="replace"), [], context.output_chars)


async def _write(arguments: _Write, context: ToolContext) -> str:
    with file_errors(arguments.path):
        await require_sandbox(context.sandbox).write_file(arguments.path, arguments.content)
    return f"wrote {arguments.path}"


async def _edit(arguments: _Edit, context: ToolContext) -> str:
    with file_errors(arguments.path):
        await require_sandbox(context.sandbox).edit_file(arguments.path, arguments.old, arguments.new)
    return f"edited {arguments.path}"


async def _think(arguments: _Think, context: ToolContext) -> str:  # noqa: ARG001
    return "noted"


async def _finish(arguments: _Finish, context: ToolContext) -> ToolResult:  # noqa: ARG001
    return ToolResult(text="", answer=arguments.answer)


BASH = FunctionTool("bash", "Run a command in a persistent shell.", _Bash, _bash)
PYTHON = FunctionTool("python", "Run code.", _Python, _python)
READ = FunctionTool("read", "Read a file.", _Read, _read, parallel=True)
WRITE = FunctionTool("write", "Write a file.", _Write, _write)
EDIT = FunctionTool("edit", "Replace a text that occurs once in a file.", _Edit, _edit)
THINK = FunctionTool("think", "Write down a thought. Nothing is run or changed.", _Think, _think, parallel=True)
FINISH = FunctionTool("finish", "End the task with your answer.", _Finish, _finish)


MOST_FILES = 200
MOST_LINES = 200
LINE_CHARS = 400
OUTPUT_BYTES = 512 * 1024
NO_FOLDER, BAD_PATTERN, NOT_FOUND = 44, 2, 127
"""Exit codes: the scripts' for a missing path, grep's for a bad pattern, bash's for a missing program."""
SIGNAL, BROKEN_PIPE = 128, 141
"""Exit codes: above the first, a signal has ended a program; the second is grep's once `head` has enough."""

# With an empty IFS the words are not split, so an unquoted parameter is expanded as a pattern and as nothing else.
GLOB_SCRIPT = """
export LC_ALL=C
cd -- "$1" 2>/dev/null || exit 44
shopt -s nullglob globstar
IFS=
found=($2)
if ((${#found[@]} == 1)) && [[ ! -e ${found[0]} && ! -L ${found[0]} ]]; then found=(); fi # it was no pattern
printf '%s\\0' "${#found[@]}"
for ((at = 0; at < ${#found[@]} && at < $3; at++)); do
  if [[ -d ${found[at]} ]]; then printf '%s/\\0' "${found[at]%/}"; else printf '%s\\0' "${found[at]}"; fi
done
"""
GREP_SCRIPT = """
export LC_ALL=C
most=$1
shift
[[ -e ${!#} ]] || exit 44
grep "$@" | head -n "$((most + 1))"
exit "${PIPESTATUS[0]}"
"""


class _Glob(Arguments):
    pattern: str = Field(min_length=1)
    path: str = "."


class _Grep(Arguments):
    pattern: str = Field(min_length=1)
    path: str = "."
    include: str = ""
    ignore_case: bool = False


async def _glob(arguments: _Glob, context: ToolContext) -> str:
    refuse_nul(arguments.pattern, "pattern")
    refuse_nul(arguments.path, "path")
    words = [arguments.path, arguments.pattern, str(MOST_FILES)]
    result = await run_script(GLOB_SCRIPT, words, context, limit=OUTPUT_BYTES)
    _refuse_failed(result, arguments.path)
    if result.timed_out:
        raise ToolInputError(f"the search took longer than {context.seconds:g} s; give a narrower path")
    count, *found = result.stdout.decode(errors="replace").removesuffix("\0").split("\0")
    if not found:
        return "[no file matches]"
    left_out = int(count) - len(found) if count.isdigit() else 0
    notes = [f"[{left_out} more files match; give a narrower pattern]"] if left_out > 0 else []
    return with_notes("\n".join(found), notes, context.output_chars)


async def _grep(arguments: _Grep, context: ToolContext) -> str:
    for name in ("pattern", "path", "include"):
        refuse_nul(getattr(arguments, name), name)
    options = ["-rnHIE", "--exclude-dir=.git", *(["-i"] if arguments.ignore_case else [])]
    if arguments.include:
        options.append(f"--include={arguments.include}")
    words = [str(MOST_LINES), *options, "-e", arguments.pattern, "--", arguments.path]
    result = await run_script(GREP_SCRIPT, words, context, limit=OUTPUT_BYTES)
    _refuse_failed(result, arguments.path)
    said = result.stderr.decode(errors="replace").strip()
    if result.exit_code == NOT_FOUND:
        raise ToolInputError("this sandbox has no grep")
    # splitlines() would also cut at a form feed and others, which are part of a line.
    text = result.stdout.decode(errors="replace").removesuffix("\n")
    lines = text.split("\n") if text else []
    if result.exit_code == BAD_PATTERN and not lines:
        raise ToolInputError(said[-LINE_CHARS:] or "grep refuses the pattern")
    return _shown(lines, result, context)


def _shown(lines: list[str], result: ExecResult, context: ToolContext) -> str:
    notes = []
    if len(lines) > MOST_LINES:
        notes.append(f"[only the first {MOST_LINES} matching lines; give a narrower pattern or path]")
    if result.timed_out:
        notes.append(f"[stopped: it took longer than {context.seconds:g} s]")
    if result.truncated:
        notes.append("[part of the output was dropped: there was too much]")
    if not lines and not notes:
        return "[no line matches]"
    return with_notes("\n".join(map(_cut, lines[:MOST_LINES])), notes, context.output_chars)


def _cut(line: str) -> str:
    return line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]} [... {len(line) - LINE_CHARS} more]"


def _refuse_failed(result: ExecResult, path: str) -> None:
    code = result.exit_code or 0
    if code == NO_FOLDER:
        raise ToolInputError(f"{path}: no such file or folder")
    if code > SIGNAL and code != BROKEN_PIPE:
        raise ToolInputError(f"the search was ended by signal {code - SIGNAL}; give a narrower pattern or path")


GLOB = FunctionTool("glob", "Find files by a pattern such as **/*.py.", _Glob, _glob, parallel=True)
GREP = FunctionTool("grep", "Find lines of files by an extended regular expression.", _Grep, _grep, parallel=True)


BUILTIN_TOOLS: tuple[Tool, ...] = (BASH, PYTHON, READ, WRITE, EDIT, EDITOR, GLOB, GREP, BROWSE, THINK, FINISH)
NEEDS_SANDBOX = frozenset(tool.name for tool in BUILTIN_TOOLS) - {THINK.name, FINISH.name}


def builtin_tools(names: Iterable[str]) -> list[Tool]:
    """Find built-in tools by name.

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


def _died(what: str, error: SessionDiedError | LimitExceededError, context: ToolContext) -> ToolResult:
    """Describe a session that the policy's code ended or keeps from starting: its output and the cause."""
    if isinstance(error, LimitExceededError):
        if error.limit == "lifetime":
            raise error  # the sandbox has ended, so no later call can work
        context.limit_violations.append(error)
    note = f"[{what} was restarted, its state is lost: {cut_middle(str(error), MIN_LIMIT * 2)}]"
    return ToolResult(with_notes(error.output, [note], context.output_chars), failed=True)


def _notes(result: BashResult | PythonResult, seconds: float) -> list[str]:
    notes = []
    if result.truncated:
        notes.append("[part of the output was dropped: there was too much]")
    if result.timed_out:
        notes.append(f"[stopped: it took longer than {seconds:g} s]")
    notes += [f"[{violation}]" for violation in result.limit_violations if not violation.is_of_call]
    return notes

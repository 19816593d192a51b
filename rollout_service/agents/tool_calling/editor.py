"""The tool `str_replace_editor`: view, create and change a file by one of five commands, as many policies know it.

It adds line numbers, insertion and undo to `read`, `write` and `edit`. A file is changed completely or not at all; the
history for `undo_edit` is bounded, and ends with the episode; a view that leaves lines out says which argument shows
them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from rollout_service.agents.tool_calling.tools import (
    MIN_LIMIT,
    Arguments,
    FunctionTool,
    ToolContext,
    ToolInputError,
    cut_middle,
    file_errors,
    run_script,
)
from rollout_service.episodes import require_sandbox
from sandboxes import Sandbox
from sandboxes.errors import FileMissingError, FileTooLargeError, SandboxFileError

NAME = "str_replace_editor"
FILE_BYTES = 1024 * 1024
"""The largest file that it opens."""
HISTORY_BYTES = 4 * 1024 * 1024
HISTORY_EDITS = 100
MOST_ENTRIES = 300
AROUND = 4
"""Lines shown before and after a change."""
NOTE_CHARS = 160

TREE_SCRIPT = """
cd -- "$1" || exit
shopt -s nullglob
left=$2
for path in * */*; do
  ((left-- > 0)) || { printf '[more entries are left out]\\n'; exit; }
  if [[ -d $path ]]; then printf '%s/\\n' "$path"; else printf '%s\\n' "$path"; fi
done
"""

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
"""Only "\\n" ends one, as for every other tool."""

Text = str | SkipJsonSchema[None]
Line = Annotated[int, Field(ge=0)] | SkipJsonSchema[None]
Range = Annotated[list[int], Field(min_length=2, max_length=2)] | SkipJsonSchema[None]


class _Editor(Arguments):
    command: Literal["view", "create", "str_replace", "insert", "undo_edit"]
    path: str
    file_text: Text = Field(None, description="for create")
    old_str: Text = Field(None, description="for str_replace; must occur exactly once")
    new_str: Text = Field(None, description="for str_replace and insert")
    insert_line: Line = Field(None, description="for insert: the line after which, 0 for the start")
    view_range: Range = Field(None, description="for view: first and last line, from 1; -1 is the end")


@dataclass(slots=True)
class _History:
    """Contents before each edit, the oldest first, bounded by number and size."""

    edits: list[list[str | None]]
    """The path, and the content as Latin-1, for JSON; None for a file that did not exist."""

    def add(self, path: str, content: bytes | None) -> None:
        self.edits.append([path, None if content is None else content.decode("latin-1")])
        while len(self.edits) > HISTORY_EDITS or self._size() > HISTORY_BYTES:
            del self.edits[0]

    def _size(self) -> int:
        return sum(len(content or "") for _, content in self.edits)

    def last(self, path: str) -> int | None:
        return max((at for at, (edited, _) in enumerate(self.edits) if edited == path), default=None)


async def _run(arguments: _Editor, context: ToolContext) -> str:
    sandbox = require_sandbox(context.sandbox)
    with file_errors(arguments.path):
        match arguments.command:
            case "view":
                return await _view(sandbox, arguments, context)
            case "create":
                return await _create(sandbox, arguments, context)
            case "str_replace":
                return await _replace(sandbox, arguments, context)
            case "insert":
                return await _insert(sandbox, arguments, context)
            case "undo_edit":
                return await _undo(sandbox, arguments.path, context)


async def _view(sandbox: Sandbox, arguments: _Editor, context: ToolContext) -> str:
    try:
        text = await _text_of(sandbox, arguments.path)
    except (FileMissingError, FileTooLargeError):
        raise
    except SandboxFileError:
        await sandbox.list(arguments.path)  # raises unless it is a folder
        if arguments.view_range is not None:
            raise ToolInputError("view_range is for files, and this is a folder") from None
        result = await run_script(TREE_SCRIPT, [arguments.path, str(MOST_ENTRIES)], context, limit=256 * 1024)
        listing = result.stdout.decode(errors="replace").removesuffix("\n")
        return cut_middle(listing or "[an empty folder]", context.output_chars)
    lines = _lines(text)
    if not lines:
        return "[an empty file]"
    first, last = _range(arguments.view_range, len(lines))
    return _numbered(lines, first, last, context.output_chars)


def _range(view_range: Sequence[int] | None, count: int) -> tuple[int, int]:
    if view_range is None:
        return 1, count
    first, last = view_range
    last = count if last == -1 else last
    if not 1 <= first <= last <= count:
        raise ToolInputError(f"view_range must be within 1 and {count}, the first line not after the last")
    return first, last


def _numbered(lines: Sequence[str], first: int, last: int, limit: int) -> str:
    """Show as many lines as fit, with a note on the others."""
    shown: list[str] = []
    room = limit - NOTE_CHARS
    for number in range(first, last + 1):
        line = f"{number:6}\t{lines[number - 1]}"
        if not shown:
            line = cut_middle(line, max(room, MIN_LIMIT))
        room -= len(line) + 1
        if shown and room < 0:
            break
        shown.append(line)
    end = first + len(shown) - 1
    if (first, end) != (1, len(lines)):
        shown.append(f"[lines {first} to {end} of {len(lines)}; view_range shows others]")
    return "\n".join(shown)


async def _create(sandbox: Sandbox, arguments: _Editor, context: ToolContext) -> str:
    text = _needed(arguments.file_text, "file_text", "create")
    try:
        before = await sandbox.read_file(arguments.path, limit=FILE_BYTES)
    except FileMissingError:
        before = None
    except FileTooLargeError as error:
        raise _too_large(arguments.path) from error
    await sandbox.write_file(arguments.path, text)
    _history(context).add(_absolute(sandbox, arguments.path), before)
    how = "created" if before is None else "replaced the content of"
    return f"{how} {arguments.path}"


async def _replace(sandbox: Sandbox, arguments: _Editor, context: ToolContext) -> str:
    old = _needed(arguments.old_str, "old_str", "str_replace")
    if not old:
        raise ToolInputError("old_str is empty; give the text to replace")
    text = await _text_of(sandbox, arguments.path)
    count = text.count(old)
    if count != 1:
        raise ToolInputError(_why_not_once(arguments.path, text, old, count))
    at = text.index(old)
    new = arguments.new_str or ""
    changed = text[:at] + new + text[at + len(old) :]
    return await _save(sandbox, arguments.path, text, changed, (at, at + len(new)), context)


def _why_not_once(path: str, text: str, old: str, count: int) -> str:
    if count == 0:
        windows = "; its lines end in \\r\\n" if "\r\n" in text and "\n" in old else ""
        return f"{path}: old_str does not occur{windows}; view the file and copy the text exactly"
    numbers: list[str] = []
    at = text.find(old)
    while at >= 0 and len(numbers) < AROUND * 2:
        numbers.append(str(text.count("\n", 0, at) + 1))
        at = text.find(old, at + len(old))
    return f"{path}: old_str occurs {count} times, in lines {', '.join(numbers)}; add lines around it"


async def _insert(sandbox: Sandbox, arguments: _Editor, context: ToolContext) -> str:
    new = _needed(arguments.new_str, "new_str", "insert")
    if arguments.insert_line is None:
        raise ToolInputError("insert needs insert_line")
    text = await _text_of(sandbox, arguments.path)
    lines = _LINE.findall(text)
    if arguments.insert_line > len(lines):
        raise ToolInputError(f"insert_line must be within 0 and {len(lines)}, the number of lines")
    before, after = "".join(lines[: arguments.insert_line]), "".join(lines[arguments.insert_line :])
    if before and not before.endswith("\n"):
        before += "\n"
    if after and not new.endswith("\n"):
        new += "\n"
    place = (len(before), len(before) + len(new))
    return await _save(sandbox, arguments.path, text, before + new + after, place, context)


async def _save(
    sandbox: Sandbox, path: str, before: str, after: str, place: tuple[int, int], context: ToolContext
) -> str:
    """Return the lines around the change."""
    await sandbox.write_file(path, after)
    _history(context).add(_absolute(sandbox, path), before.encode())
    lines = _lines(after)
    if not lines:
        return f"edited {path}, which is empty now"
    first = max(1, after.count("\n", 0, place[0]) + 1 - AROUND)
    last = min(len(lines), after.count("\n", 0, place[1]) + 1 + AROUND)
    return f"edited {path}:\n" + _numbered(lines, min(first, last), last, context.output_chars - len(path) - 10)


async def _undo(sandbox: Sandbox, path: str, context: ToolContext) -> str:
    history, absolute = _history(context), _absolute(sandbox, path)
    at = history.last(absolute)
    if at is None:
        raise ToolInputError(f"{path}: there is no edit to undo")
    before = history.edits[at][1]
    if before is None:
        result = await run_script('rm -f -- "$1"', [absolute], context, limit=FILE_BYTES)
        if result.exit_code != 0:
            raise ToolInputError(f"{path} cannot be removed: {result.stderr.decode(errors='replace').strip()}")
    else:
        await sandbox.write_file(path, before.encode("latin-1"))
    del history.edits[at]
    return f"undid the last edit of {path}" + (", which is removed again" if before is None else "")


async def _text_of(sandbox: Sandbox, path: str) -> str:
    try:
        data = await sandbox.read_file(path, limit=FILE_BYTES)
    except FileTooLargeError as error:
        raise _too_large(path) from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ToolInputError(
            f"{path} is not text (UTF-8): images and other binary files cannot be shown or edited"
        ) from error


def _lines(text: str) -> list[str]:
    return [line.removesuffix("\n") for line in _LINE.findall(text)]


def _too_large(path: str) -> ToolInputError:
    return ToolInputError(f"{path} has more than {FILE_BYTES} bytes; look at parts of it with other tools")


def _needed(value: str | None, name: str, command: str) -> str:
    if value is None:
        raise ToolInputError(f"{command} needs {name}")
    return value


def _absolute(sandbox: Sandbox, path: str) -> str:
    return posixpath.normpath(posixpath.join(sandbox.workdir, path))


def _history(context: ToolContext) -> _History:
    return _History(context.state.setdefault(NAME, []))


EDITOR = FunctionTool(NAME, "View, create or edit a file, or undo the last edit.", _Editor, _run)

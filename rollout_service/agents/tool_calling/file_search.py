"""The tools that find files: `glob` by name, and `grep` by content.

Guarantees: they run in the agent's sandbox with bash and the image's own grep; the policy's words are arguments, never
part of a script; results are bounded, and the policy is told what was left out.
"""

from __future__ import annotations

from pydantic import Field

from rollout_service.agents.errors import ToolInputError
from rollout_service.agents.tool_calling.sandbox_calls import refuse_nul, run_script
from rollout_service.agents.tool_calling.text import with_notes
from rollout_service.agents.tool_calling.tools import Arguments, FunctionTool, ToolContext
from sandboxes import ExecResult

MOST_FILES = 200
MOST_LINES = 200
LINE_CHARS = 400
OUTPUT_BYTES = 512 * 1024
NO_FOLDER, BAD_PATTERN, NOT_FOUND = 44, 2, 127
"""Exit codes: of the scripts for a missing path, of grep for a bad pattern, of bash for a missing program."""

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
    _refuse_missing(result, arguments.path)
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
    _refuse_missing(result, arguments.path)
    said = result.stderr.decode(errors="replace").strip()
    if result.exit_code == NOT_FOUND:
        raise ToolInputError("this sandbox has no grep")
    lines = result.stdout.decode(errors="replace").splitlines()
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


def _refuse_missing(result: ExecResult, path: str) -> None:
    if result.exit_code == NO_FOLDER:
        raise ToolInputError(f"{path}: no such file or folder")


GLOB = FunctionTool("glob", "Find files by a pattern such as **/*.py.", _Glob, _glob, parallel=True)
GREP = FunctionTool(
    "grep", "Find lines of files by an extended regular expression.", _Grep, _grep, parallel=True
)

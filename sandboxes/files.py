"""Reading, writing, listing and editing files of a sandbox, by programs that run inside of it.

A path means what it means there: a link that the agent made leads nowhere but inside. What comes back is
hostile, so it is bounded and checked. The image needs bash and the usual small programs (coreutils, tar).
"""

import posixpath
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Literal, Protocol

from sandboxes.contract import DEFAULT_FILE_LIMIT, ExecResult, FileEntry
from sandboxes.errors import EditMatchError, FileMissingError, FileTooLargeError, SandboxFileError

FILE_TIMEOUT = 120.0
LIST_LIMIT = 4 * 1024 * 1024
MISSING, TOO_LARGE = 44, 45
"""Exit codes of the scripts below for these two findings."""

READ = """
[[ -e $1 || -L $1 ]] || exit 44
[[ -f $1 ]] || { echo "not a file" >&2; exit 1; }
size=$(stat -Lc %s -- "$1") || exit
((size <= $2)) || { echo "$size bytes" >&2; exit 45; }
exec head -c "$(($2 + 1))" -- "$1"
"""
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && exec cat >"$1"'
LIST = """
[[ -e $1 || -L $1 ]] || exit 44
cd -- "$1" || exit
shopt -s nullglob dotglob
for name in *; do
  kind=o
  if [[ -L $name ]]; then kind=l; elif [[ -d $name ]]; then kind=d; elif [[ -f $name ]]; then kind=f; fi
  printf '%s\\0%s\\0' "$kind" "$name"
  [[ $kind == f ]] && stat -c %s -- "$name" || echo 0
  printf '\\0'
done
"""
EXPORT = """
[[ -e $1 || -L $1 ]] || exit 44
exec tar -C "$2" -cf - -- "$3"
"""
IMPORT = 'mkdir -p -- "$1" && exec tar -C "$1" --no-same-owner -xf -'

Kind = Literal["file", "directory", "symlink", "other"]
KINDS: dict[bytes, Kind] = {b"f": "file", b"d": "directory", b"l": "symlink"}


class Runner(Protocol):
    """Runs a program inside: `Sandbox.exec` with the working folder as it is."""

    def __call__(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float, output_limit: int
    ) -> Awaitable[ExecResult]: ...


def script(text: str, *arguments: str) -> list[str]:
    """The argument list of a bash script with its positional parameters: no quoting is needed."""
    return ["bash", "--norc", "-c", text, "files", *arguments]


class Files:
    """The files of one sandbox."""

    def __init__(
        self,
        run: Runner,
        stream: Callable[[Sequence[str], int], AsyncIterator[bytes]],
        feed: Callable[[Sequence[str], AsyncIterable[bytes]], Awaitable[None]],
        resolve: Callable[[str], str],
    ) -> None:
        """`resolve` makes the path absolute, as the sandbox sees it; it looks at no file."""
        self._run = run
        self._stream = stream
        self._feed = feed
        self._resolve = resolve

    async def read(self, path: str, limit: int) -> bytes:
        """See `Sandbox.read_file`."""
        target = self._resolve(path)
        result = await self._run(
            script(READ, target, str(limit)), timeout=FILE_TIMEOUT, output_limit=2 * limit + 4096
        )
        _check(result, path)
        if len(result.stdout) > limit:
            raise FileTooLargeError(f"{path}: more than {limit} bytes")
        return result.stdout

    async def write(self, path: str, data: bytes | str) -> None:
        """See `Sandbox.write_file`."""
        content = data.encode() if isinstance(data, str) else data
        _check(
            await self._run(
                script(WRITE, self._resolve(path)), stdin=content, timeout=FILE_TIMEOUT, output_limit=4096
            ),
            path,
        )

    async def edit(self, path: str, old: str, new: str, *, replace_all: bool) -> int:
        """See `Sandbox.edit_file`."""
        try:
            text = (await self.read(path, DEFAULT_FILE_LIMIT)).decode("utf-8")
        except UnicodeDecodeError as error:
            raise SandboxFileError(f"{path}: not UTF-8 text") from error
        count = text.count(old) if old else 0
        if count == 0:
            raise EditMatchError(
                f"{path}: the text to replace is not in the file", count=0, hint="read the file first"
            )
        if count > 1 and not replace_all:
            raise EditMatchError(f"{path}: the text to replace is there {count} times", count=count)
        await self.write(path, text.replace(old, new))
        return count

    async def list(self, path: str) -> list[FileEntry]:
        """See `Sandbox.list`."""
        result = await self._run(
            script(LIST, self._resolve(path)), timeout=FILE_TIMEOUT, output_limit=LIST_LIMIT
        )
        _check(result, path)
        if result.truncated:
            raise FileTooLargeError(f"{path}: the listing has more than {LIST_LIMIT} bytes")
        parts = result.stdout.split(b"\0")
        entries = [_entry(*parts[at : at + 3]) for at in range(0, len(parts) - 2, 3)]
        return sorted(entries, key=lambda entry: entry.name)

    async def export(self, path: str, limit: int) -> AsyncIterator[bytes]:
        """See `Sandbox.export_path`."""
        target = self._resolve(path)
        parent, name = posixpath.split(target)
        try:
            stream = self._stream(script(EXPORT, target, parent, name or "."), limit)
            async with aclosing(stream):  # type: ignore[type-var]
                async for part in stream:
                    yield part
        except SandboxFileError as error:
            if str(error).endswith(f"ended with {MISSING}"):
                raise FileMissingError(f"{path}: no such file or folder") from error
            raise

    async def import_(self, parent: str, tar: AsyncIterable[bytes]) -> None:
        """See `Sandbox.import_path`."""
        await self._feed(script(IMPORT, self._resolve(parent)), tar)


def _check(result: ExecResult, path: str) -> None:
    said = result.stderr.decode("utf-8", errors="replace").strip()
    if result.timed_out:
        raise SandboxFileError(f"{path}: no answer within {FILE_TIMEOUT:.0f} s")
    if result.exit_code == MISSING:
        raise FileMissingError(f"{path}: no such file or folder")
    if result.exit_code == TOO_LARGE:
        raise FileTooLargeError(f"{path}: {said}, which is more than the limit")
    if result.exit_code != 0:
        raise SandboxFileError(f"{path}: {said or f'failed with {result.exit_code}'}")


def _entry(kind: bytes, name: bytes, size: bytes) -> FileEntry:
    number = size.strip()
    return FileEntry(
        name=name.decode("utf-8", errors="replace"),
        kind=KINDS.get(kind, "other"),
        size=int(number) if number.isdigit() else 0,
    )

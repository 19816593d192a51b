"""Read, write, list and edit a sandbox's files, by programs that run inside it.

They serve the agent, who may have replaced the programs. For grading, `export` reads the files instead.

- A path means what it means inside: a link that the agent made leads nowhere else.
- Everything that comes back is untrusted, so it is bounded and checked.
- Contents pass in pieces, so memory on the host does not grow with them.
- A reader inside finds the whole old file or the whole new one: a draft replaces the file once every byte has arrived.

The image needs bash, coreutils and tar.
"""

import secrets
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Literal

import anyio
import anyio.to_thread

from sandboxes.contract import DEFAULT_FILE_LIMIT, FileEntry, Sandbox
from sandboxes.errors import (
    DiskFullError,
    EditMatchError,
    FileMissingError,
    FileTooLargeError,
    SandboxError,
    SandboxFileError,
)
from sandboxes.runtime.execution import ProgramFailedError

FILE_TIMEOUT = 120.0
DROP_SECONDS = 5.0
LIST_LIMIT = 4 * 1024 * 1024
MISSING, TOO_LARGE, SHRUNK = 44, 45, 46
FILE_SIZE_SIGNAL = 128 + 25
"""SIGXFSZ: the file reached the limit on file sizes."""
FULL = ("No space left on device", "Disk quota exceeded", "File too large")

# The file is opened once, and only as many bytes as it has then are read, so a growing log comes to an end.
# Kernel files report a size of 0 and are read to their end.
READ = """
export LC_ALL=C
[[ -e $1 || -L $1 ]] || exit 44
[[ -f $1 ]] || { echo "not a file" >&2; exit 1; }
exec 3<"$1" || exit
size=$(stat -Lc %s /dev/fd/3) || exit
[[ -z $2 ]] || ((size <= $2)) || { echo "$size bytes" >&2; exit 45; }
((size > 0)) || exec cat <&3
head -c "$size" <&3 || exit
read -r _ position </proc/self/fdinfo/3
((position >= size)) || exit 46
"""
# A link is written through. An existing file keeps its mode, and one that is not writable stays as it is.
TARGET = """
export LC_ALL=C
target=$(realpath -m -- "$1" && printf x) || exit
target=${target%$'\\nx'}
folder=${target%/*}/
draft=$folder.$2.part
fail() { echo "$1" >&2; exit 1; }
"""
RECEIVE = f"""{TARGET}
[[ ! -e $target || -f $target ]] || fail "not a file"
[[ ! -e $target || -w $target ]] || fail "Permission denied"
mkdir -p -- "$folder" || exit
(set -C; exec cat >"$draft") || exit
"""
PLACE = """
[[ $(stat -c %s -- "$draft") == "$3" ]] || fail "not all of it arrived"
if [[ -e $target ]]; then chmod --reference="$target" -- "$draft"; fi || fail "its mode cannot be kept"
mv -fT -- "$draft" "$target" || fail "it cannot be put in its place"
"""
WRITE = RECEIVE + PLACE
COMMIT = TARGET + PLACE
DROP = f'{TARGET} rm -f -- "$draft"'
# Names may contain anything but NUL. A file that disappears meanwhile is left out.
LIST = """
export LC_ALL=C
[[ -e $1 || -L $1 ]] || exit 44
cd -- "$1" || exit
shopt -s nullglob dotglob
names=(./*)  # a file named - is not its standard input
for ((at = 0; at < ${#names[@]}; at += 500)); do
  stat --printf='%f %s %n\\0' -- "${names[@]:at:500}" 2>/dev/null
done
exit 0
"""
IMPORT = 'mkdir -p -- "$1" && exec tar -C "$1" --no-same-owner -xf -'

Kind = Literal["file", "directory", "symlink", "other"]
KINDS: dict[int, Kind] = {0o100000: "file", 0o040000: "directory", 0o120000: "symlink"}
KIND_MASK = 0o170000


def bash_argv(text: str, *arguments: str) -> list[str]:
    return ["bash", "--norc", "-c", text, "files", *arguments]


class SandboxWithFiles(Sandbox):
    """The file operations of a sandbox that runs programs, each in a folder that always exists."""

    @abstractmethod
    def resolve(self, path: str) -> str:
        """Return the absolute path inside, without looking at files."""

    @abstractmethod
    def _stream(self, argv: Sequence[str], limit: int | None) -> AsyncGenerator[bytes, None]:
        """Yield a program's output, up to a number of bytes.

        Raises:
            ProgramFailedError: The program failed.
        """

    @abstractmethod
    async def _feed(self, argv: Sequence[str], data: AsyncIterable[bytes]) -> int:
        """Feed a stream to a program, and return how many bytes it took.

        Raises:
            ProgramFailedError: The program failed.
        """

    async def read_file(self, path: str, *, limit: int = DEFAULT_FILE_LIMIT) -> bytes:
        return b"".join([part async for part in self.read_stream(path, limit=limit)])

    async def read_stream(self, path: str, *, limit: int | None = None) -> AsyncGenerator[bytes, None]:
        allowed = "" if limit is None else str(limit)
        stream = self._stream(bash_argv(READ, self.resolve(path), allowed), limit)
        try:
            async with aclosing(stream):
                async for part in stream:
                    yield part
        except ProgramFailedError as error:
            raise _make_error(path, error.exit_code, error.said) from error

    async def write_file(self, path: str, data: bytes | str) -> None:
        content = data.encode() if isinstance(data, str) else data
        async with self._draft(path) as token:
            await self._feed_script(path, WRITE, token, _as_stream(content), size=len(content))

    async def write_stream(self, path: str, data: AsyncIterable[bytes]) -> None:
        async with self._draft(path) as token:
            size = await self._feed_script(path, RECEIVE, token, data)
            await self._feed_script(path, COMMIT, token, _as_stream(b""), size=size)

    @asynccontextmanager
    async def _draft(self, path: str) -> AsyncIterator[str]:
        """Yield the token of a draft, which is removed if the block fails; a closed sandbox has none left."""
        token = secrets.token_hex(8)
        try:
            yield token
        except BaseException:
            script = bash_argv(DROP, self.resolve(path), token)
            with anyio.CancelScope(shield=True), suppress(SandboxError):
                await self.exec(script, cwd="/", timeout=DROP_SECONDS, output_limit=4096)
            raise

    async def _feed_script(
        self, path: str, text: str, token: str, data: AsyncIterable[bytes], *, size: int | None = None
    ) -> int:
        """Return how many bytes the script took."""
        arguments = [self.resolve(path), token, *([] if size is None else [str(size)])]
        try:
            return await self._feed(bash_argv(text, *arguments), data)
        except ProgramFailedError as error:
            raise _make_error(path, error.exit_code, error.said) from error

    async def edit_file(self, path: str, old: str, new: str, *, replace_all: bool = False) -> int:
        content = await self.read_file(path)
        # In a thread, since these are up to 16 MiB.
        count, edited = await anyio.to_thread.run_sync(_edit, path, content, old, new, replace_all)
        await self.write_file(path, edited)
        return count

    async def list(self, path: str = ".") -> list[FileEntry]:
        script = bash_argv(LIST, self.resolve(path))
        result = await self.exec(script, cwd="/", timeout=FILE_TIMEOUT, output_limit=LIST_LIMIT)
        if result.timed_out:
            raise SandboxFileError(f"{path}: no answer within {FILE_TIMEOUT:.0f} s")
        if result.exit_code != 0:
            raise _make_error(path, result.exit_code, result.stderr.decode("utf-8", errors="replace"))
        if result.truncated:
            raise FileTooLargeError(f"{path}: the listing is longer than {LIST_LIMIT} bytes")
        return await anyio.to_thread.run_sync(_parse_listing, path, result.stdout)

    async def import_path(self, parent: str, tar: AsyncIterable[bytes]) -> None:
        try:
            await self._feed(bash_argv(IMPORT, self.resolve(parent)), tar)
        except ProgramFailedError as error:
            raise _make_error(parent, error.exit_code, error.said) from error


def _edit(path: str, content: bytes, old: str, new: str, replace_all: bool) -> tuple[int, bytes]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SandboxFileError(f"{path}: not UTF-8 text") from error
    count = text.count(old) if old else 0
    if count == 0:
        raise EditMatchError(f"{path}: the text to replace is not in the file", count=0, hint="read the file first")
    if count > 1 and not replace_all:
        raise EditMatchError(f"{path}: the text to replace occurs {count} times", count=count)
    size = len(content) + count * (len(new.encode()) - len(old.encode()))
    if size > DEFAULT_FILE_LIMIT:
        raise FileTooLargeError(f"{path}: the edited file would have {size} bytes", hint="replace less, or by less")
    return count, text.replace(old, new).encode()


async def _as_stream(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data


def _make_error(path: str, code: int | None, said: str) -> SandboxFileError:
    said = said.strip()
    if code == MISSING:
        return FileMissingError(f"{path}: no such file or folder")
    if code == TOO_LARGE:
        return FileTooLargeError(f"{path}: {said} exceed the limit")
    if code == SHRUNK:
        return SandboxFileError(f"{path}: the file shrank while it was read", hint="read it again")
    if code == FILE_SIZE_SIGNAL or any(text in said for text in FULL):
        return DiskFullError(f"{path}: the sandbox's disk is full, or the file is too large")
    return SandboxFileError(f"{path}: {said or f'exit code {code}'}")


def _parse_listing(path: str, listing: bytes) -> list[FileEntry]:
    """Call it in a thread: code inside can make hundreds of thousands of files."""
    entries = (_parse_entry(path, part) for part in listing.split(b"\0")[:-1])
    return sorted(entries, key=lambda entry: entry.name)


def _parse_entry(path: str, part: bytes) -> FileEntry:
    """
    Raises:
        SandboxFileError: The entry is invalid, because a program inside replaced the one that lists.
    """
    fields = part.split(b" ", 2)
    try:
        mode, size, name = int(fields[0], 16), int(fields[1]), fields[2].decode("utf-8", "surrogateescape")
    except (ValueError, IndexError) as error:
        raise SandboxFileError(f"{path}: the listing is malformed") from error
    kind = KINDS.get(mode & KIND_MASK, "other")
    return FileEntry(name=name.removeprefix("./"), kind=kind, size=size if kind == "file" else 0)

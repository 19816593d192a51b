"""The files of E2B's sandboxes: the service `filesystem.Filesystem` of the daemon that E2B has in each.

Paths are those inside: each operation is a program of the image (`find`, `mkdir`, `mv`, `rm`) in the sandbox, and what
it prints is untrusted. A relative path begins at the working folder.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.filesystem import filesystem_connect, filesystem_pb
from protobuf.wkt.google.protobuf.timestamp_pb import Timestamp

from rollout_service.server.e2b.boxes import Box
from sandboxes import Sandbox, SandboxError

SECONDS = 60.0
LISTING_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
FIELDS = ("%y", "%Y", "%s", "%m", "%M", "%u", "%g", "%T@", "%l", "%p")
FORMAT = "".join(f"{one}\\0" for one in FIELDS)
MAKE = 'if [ -d "$1" ]; then exit 17; fi; mkdir -p -- "$1"'
MOVE = '[ -e "$1" ] || [ -L "$1" ] || exit 44; mkdir -p -- "$(dirname -- "$2")" && mv -fT -- "$1" "$2"'
EXISTS, MISSING, NO_PROGRAM = 17, 44, 127
KINDS = {
    "f": filesystem_pb.FileType.FILE,
    "d": filesystem_pb.FileType.DIRECTORY,
    "l": filesystem_pb.FileType.SYMLINK,
}
LAST_SECOND = 253_402_300_799
"""The last that a client's calendar has."""
NO_WATCHERS = "folders are not watched here; list the folder again instead"


def absolute(sandbox: Sandbox, path: str) -> str:
    """Return a path as code inside names it from anywhere."""
    return posixpath.normpath(posixpath.join(sandbox.workdir, path))


class FilesystemCalls(filesystem_connect.Filesystem):  # type: ignore[misc]  # generated, without types
    """Answers for the files of all sandboxes; `find` returns the sandbox of a request."""

    def __init__(self, find: Callable[[Any], Box]) -> None:
        self._find = find

    async def stat(self, request: Any, ctx: Any) -> Any:
        """See the protocol."""
        return filesystem_pb.StatResponse(entry=await self._entry(request.path, ctx))

    async def list_dir(self, request: Any, ctx: Any) -> Any:
        """Describe what is in a folder, as deep as asked."""
        depth = min(request.depth or 1, MAX_DEPTH)
        folder, *entries = await self._look(request.path, ctx, depth)
        if folder.type != filesystem_pb.FileType.DIRECTORY:
            raise ConnectError(Code.INVALID_ARGUMENT, f"{request.path!r} is no folder")
        return filesystem_pb.ListDirResponse(entries=sorted(entries, key=lambda entry: str(entry.path)))

    async def make_dir(self, request: Any, ctx: Any) -> Any:
        """See the protocol."""
        await self._run(ctx, ["bash", "-c", MAKE, "-", self._path(request.path, ctx)])
        return filesystem_pb.MakeDirResponse(entry=await self._entry(request.path, ctx))

    async def move(self, request: Any, ctx: Any) -> Any:
        """See the protocol."""
        paths = [self._path(path, ctx) for path in (request.source, request.destination)]
        await self._run(ctx, ["bash", "-c", MOVE, "-", *paths])
        return filesystem_pb.MoveResponse(entry=await self._entry(request.destination, ctx))

    async def remove(self, request: Any, ctx: Any) -> Any:
        """See the protocol."""
        await self._run(ctx, ["rm", "-rf", "--", self._path(request.path, ctx)])
        return filesystem_pb.RemoveResponse()

    def watch_dir(self, *_: Any) -> NoReturn:
        """Refuse to watch a folder."""
        raise ConnectError(Code.UNIMPLEMENTED, NO_WATCHERS)

    async def create_watcher(self, *_: Any) -> NoReturn:
        """Refuse to watch a folder."""
        raise ConnectError(Code.UNIMPLEMENTED, NO_WATCHERS)

    def _path(self, path: str, ctx: Any) -> str:
        if not path:
            raise ConnectError(Code.INVALID_ARGUMENT, "the path is empty")
        return absolute(self._find(ctx).sandbox, path)

    async def _entry(self, path: str, ctx: Any) -> Any:
        return (await self._look(path, ctx, 0))[0]

    async def _look(self, path: str, ctx: Any, depth: int) -> list[Any]:
        """Describe a path and what is below it; a link is followed if that is asked for."""
        links = "-H" if depth else "-P"
        printed = await self._run(
            ctx, ["find", links, self._path(path, ctx), "-maxdepth", str(depth), "-printf", FORMAT]
        )
        rows = printed.decode(errors="replace").split("\0")[:-1]
        try:
            found = [_read(rows[at : at + len(FIELDS)]) for at in range(0, len(rows), len(FIELDS))]
        except ValueError:
            found = []
        if not found:
            raise ConnectError(Code.INTERNAL, "the sandbox's `find` printed no description of the path")
        return found

    async def _run(self, ctx: Any, argv: Sequence[str]) -> bytes:
        """Run a program inside, and return what it printed.

        Raises:
            ConnectError: It failed.
        """
        sandbox, env = self._find(ctx).sandbox, {"LC_ALL": "C"}
        try:
            done = await sandbox.exec(argv, cwd="/", env=env, timeout=SECONDS, output_limit=LISTING_BYTES)
        except ValueError as error:
            raise ConnectError(Code.INVALID_ARGUMENT, str(error)) from None
        except SandboxError as error:
            raise ConnectError(Code.UNAVAILABLE, str(error)) from error
        if done.timed_out or done.truncated:
            raise ConnectError(Code.FAILED_PRECONDITION, "there are too many files; ask for less at once")
        if done.exit_code and not done.stdout:  # a folder that may not be read is left out of a listing
            _fail(done.exit_code, done.stderr[-1_000:].decode(errors="replace").strip())
        return done.stdout


def _fail(code: int, said: str) -> NoReturn:
    """Raise the error that the end of a program stands for."""
    if code == EXISTS:
        raise ConnectError(Code.ALREADY_EXISTS, "there is such a folder")
    if code == MISSING or "No such file" in said or "Not a directory" in said:
        raise ConnectError(Code.NOT_FOUND, said or "there is no such file or folder")
    if code == NO_PROGRAM or "-printf" in said:
        raise ConnectError(Code.UNIMPLEMENTED, f"the image needs GNU find and coreutils: {said}")
    raise ConnectError(Code.PERMISSION_DENIED if "denied" in said else Code.INVALID_ARGUMENT, said)


def _read(row: list[str]) -> Any:
    """Return an entry from the fields that `find` printed.

    Raises:
        ValueError: They are not such fields.
    """
    kind, target_kind, size, mode, permissions, owner, group, modified, target, path = row
    is_link = kind == "l"
    more = {"symlink_target": target} if is_link else {}
    return filesystem_pb.EntryInfo(
        name=posixpath.basename(path) or "/",
        type=KINDS.get(target_kind, filesystem_pb.FileType.SYMLINK if is_link else filesystem_pb.FileType(0)),
        path=path,
        size=int(size),
        mode=int(mode, 8),
        permissions=permissions,
        owner=owner,
        group=group,
        modified_time=Timestamp(seconds=min(max(int(modified.partition(".")[0]), 0), LAST_SECOND)),
        is_symlink=is_link,
        **more,
    )

"""The files of E2B's sandboxes: the service `filesystem.Filesystem` of the daemon that E2B has in each.

Paths are those inside: each operation runs a program of the image (`find`, `mkdir`, `mv`, `rm`) in the sandbox, and its
output is untrusted. A relative path begins at the working folder.
"""

from __future__ import annotations

import posixpath
from typing import Any, NoReturn

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.filesystem import filesystem_connect, filesystem_pb
from protobuf.wkt.google.protobuf.timestamp_pb import Timestamp

from rollout_service.server.e2b.boxes import CURRENT_BOX
from sandboxes import Sandbox, SandboxError

SECONDS = 60.0
LISTING_BYTES, MAX_DEPTH = 8 * 1024 * 1024, 64
FIELDS = ("%y", "%Y", "%s", "%m", "%M", "%u", "%g", "%T@", "%l", "%p")
FORMAT = "".join(f"{one}\\0" for one in FIELDS)
LOOK = 'find "$3" "$1" -maxdepth "$2" -printf "$4"'
MAKE = 'if [ -d "$1" ]; then exit 17; fi; mkdir -p -- "$1"'
MOVE = '[ -e "$1" ] || [ -L "$1" ] || exit 44; mkdir -p -- "$(dirname -- "$2")" && mv -fT -- "$1" "$2"'
REMOVE = 'rm -rf -- "$1"'
EXISTS, MISSING = 17, 44
Kind = filesystem_pb.FileType
KINDS = {"f": Kind.FILE, "d": Kind.DIRECTORY}
LAST_SECOND = 253_402_300_799
"""The last one of a client's calendar, in the year 9999."""


def absolute(sandbox: Sandbox, path: str) -> str:
    return posixpath.normpath(posixpath.join(sandbox.workdir, path))


class FilesystemCalls(filesystem_connect.Filesystem):  # type: ignore[misc]  # generated, without types
    async def stat(self, request: Any, _: Any) -> Any:
        return filesystem_pb.StatResponse(entry=(await self._look(request.path))[0])

    async def list_dir(self, request: Any, _: Any) -> Any:
        folder, *entries = await self._look(request.path, min(request.depth or 1, MAX_DEPTH))
        if folder.type != Kind.DIRECTORY:
            raise ConnectError(Code.INVALID_ARGUMENT, f"{request.path!r} is not a folder")
        return filesystem_pb.ListDirResponse(entries=sorted(entries, key=lambda entry: str(entry.path)))

    async def make_dir(self, request: Any, _: Any) -> Any:
        await self._run(MAKE, request.path)
        return filesystem_pb.MakeDirResponse(entry=(await self._look(request.path))[0])

    async def move(self, request: Any, _: Any) -> Any:
        await self._run(MOVE, request.source, request.destination)
        return filesystem_pb.MoveResponse(entry=(await self._look(request.destination))[0])

    async def remove(self, request: Any, _: Any) -> Any:
        await self._run(REMOVE, request.path)
        return filesystem_pb.RemoveResponse()

    def watch_dir(self, *_: Any) -> NoReturn:
        """Refuse; the asynchronous client calls this."""
        raise ConnectError(Code.UNIMPLEMENTED, "folders are not watched here; list the folder again instead")

    async def create_watcher(self, *_: Any) -> NoReturn:
        """Refuse; the blocking client calls this."""
        self.watch_dir()

    async def _look(self, path: str, depth: int = 0) -> list[Any]:
        """Describe a path and what is below it; a link is followed if `depth` is above 0."""
        more = [str(depth), "-H" if depth else "-P", FORMAT]
        rows = (await self._run(LOOK, path, more=more)).decode(errors="replace").split("\0")[:-1]
        try:
            found = [_entry(*rows[at : at + len(FIELDS)]) for at in range(0, len(rows), len(FIELDS))]
        except (ValueError, TypeError):
            found = []
        if not found:
            raise ConnectError(Code.UNIMPLEMENTED, "the image's `find` is not GNU's")
        return found

    async def _run(self, script: str, *paths: str, more: list[str] | None = None) -> bytes:
        if not all(paths):
            raise ConnectError(Code.INVALID_ARGUMENT, "the path is empty")
        sandbox = CURRENT_BOX.get().sandbox
        argv = ["bash", "-c", script, "-", *(absolute(sandbox, path) for path in paths), *(more or [])]
        env = {"LC_ALL": "C"}  # `_failure` reads messages
        try:
            done = await sandbox.exec(argv, cwd="/", env=env, timeout=SECONDS, output_limit=LISTING_BYTES)
        except ValueError as error:
            raise ConnectError(Code.INVALID_ARGUMENT, str(error)) from None
        except SandboxError as error:
            raise ConnectError(Code.UNAVAILABLE, str(error)) from error
        if done.timed_out or done.truncated:
            raise ConnectError(Code.FAILED_PRECONDITION, "there are too many files; ask for less at once")
        if done.exit_code and not done.stdout:  # a folder that may not be read is left out of a listing
            raise _failure(done.exit_code, done.stderr[-1_000:].decode(errors="replace").strip())
        return done.stdout


def _failure(code: int, said: str) -> ConnectError:
    if code == EXISTS:
        return ConnectError(Code.ALREADY_EXISTS, "there is such a folder")
    if code == MISSING or "No such file" in said or "Not a directory" in said:
        return ConnectError(Code.NOT_FOUND, said or "there is no such file or folder")
    return ConnectError(Code.PERMISSION_DENIED if "denied" in said else Code.INVALID_ARGUMENT, said)


def _entry(
    kind: str,
    target_kind: str,
    size: str,
    mode: str,
    text: str,
    owner: str,
    group: str,
    time: str,
    link: str,
    path: str,
) -> Any:
    return filesystem_pb.EntryInfo(
        name=posixpath.basename(path) or "/",
        type=KINDS.get(target_kind, Kind.SYMLINK if kind == "l" else Kind.UNSPECIFIED),
        path=path,
        size=int(size),
        mode=int(mode, 8),
        permissions=text,
        owner=owner,
        group=group,
        modified_time=Timestamp(seconds=min(max(int(time.partition(".")[0]), 0), LAST_SECOND)),
        is_symlink=kind == "l",
        **({"symlink_target": link} if kind == "l" else {}),
    )

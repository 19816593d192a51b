"""The files of E2B's sandboxes: the service `filesystem.Filesystem` of the daemon that E2B has in each.

Paths are those inside: each operation runs a program of the image (`find`, `mkdir`, `mv`, `rm`) in the sandbox, and its
output is untrusted. A relative path begins at the working folder. A watched folder is listed again and again, and what
changes back between two listings is not seen.
"""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import anyio.to_thread
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.filesystem import filesystem_connect, filesystem_pb
from protobuf import Oneof
from protobuf.wkt.google.protobuf.timestamp_pb import Timestamp

from rollout_service.server.e2b.boxes import CURRENT_BOX
from sandboxes import Sandbox, SandboxError

SECONDS = 60.0
LISTING_BYTES, MAX_DEPTH = 2 * 1024 * 1024, 64
FIELDS = ("%y", "%Y", "%s", "%m", "%M", "%U", "%G", "%T@", "%l", "%p")
FORMAT = "".join(f"{one}\\0" for one in FIELDS)
OWNER, GROUP = FIELDS.index("%U"), FIELDS.index("%G")
# For names in place of ids, `find` would read both files again for each file, which takes five times as long.
LOOK = """
find "$3" "$1" -maxdepth "$2" -printf "$4"; code=$?
printf '\\0%s' "$(</etc/passwd)" "$(</etc/group)" 2>/dev/null
exit "$code"
"""
MAKE = 'if [ -d "$1" ]; then exit 17; fi; mkdir -p -- "$1"'
MOVE = '[ -e "$1" ] || [ -L "$1" ] || exit 44; mkdir -p -- "$(dirname -- "$2")" && mv -fT -- "$1" "$2"'
REMOVE = 'rm -rf -- "$1"'
MAX_WATCHERS, WATCHED_BYTES, WATCH_SECONDS = 16, 256 * 1024, 1.0
"""How many folders of a sandbox are watched at once, how long each listing may be, and how often streams make one."""
NOT_GNU = "the image's `find` is not GNU's"
EXISTS, MISSING = 17, 44
Rows = dict[str, list[str]]
"""The `FIELDS` of each file in a folder, by its path from there."""
Kind = filesystem_pb.FileType
Event, Change = filesystem_pb.FilesystemEvent, filesystem_pb.EventType
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

    async def watch_dir(self, request: Any, _: Any) -> AsyncIterator[Any]:
        """Yield changes; the asynchronous client calls this."""
        response, box, number = filesystem_pb.WatchDirResponse, CURRENT_BOX.get(), await self._watch(request)
        try:
            yield response(event=Oneof("start", response.StartEvent()))
            while True:
                await anyio.sleep(WATCH_SECONDS)
                for event in [] if box.paused else await self._changes(number):
                    yield response(event=Oneof("filesystem", event))
                yield response(event=Oneof("keepalive", response.KeepAlive()))  # shows whether the client is there
        finally:
            box.watchers.pop(number, None)

    async def create_watcher(self, request: Any, _: Any) -> Any:
        """Watch until `remove_watcher`; the blocking client calls this."""
        return filesystem_pb.CreateWatcherResponse(watcher_id=await self._watch(request))

    async def get_watcher_events(self, request: Any, _: Any) -> Any:
        return filesystem_pb.GetWatcherEventsResponse(events=await self._changes(request.watcher_id))

    async def remove_watcher(self, request: Any, _: Any) -> Any:
        CURRENT_BOX.get().watchers.pop(request.watcher_id, None)
        return filesystem_pb.RemoveWatcherResponse()

    async def _watch(self, request: Any) -> str:
        number, found, watchers = secrets.token_hex(8), await self._watched(request), CURRENT_BOX.get().watchers
        if len(watchers) >= MAX_WATCHERS:
            raise ConnectError(Code.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} folders of the sandbox are watched")
        watchers[number] = [request, found]
        return number

    async def _changes(self, number: str) -> list[Any]:
        if (watcher := CURRENT_BOX.get().watchers.get(number)) is None:
            raise ConnectError(Code.NOT_FOUND, "there is no such watcher; it may have been removed")
        request, before = watcher
        watcher[1] = await self._watched(request)
        return [*_events(before, watcher[1], with_entry=request.include_entry)]

    async def _watched(self, request: Any) -> Rows:
        folder, *rows = await self._list(request.path, MAX_DEPTH if request.recursive else 1, WATCHED_BYTES)
        if folder[1] != "d":
            raise ConnectError(Code.INVALID_ARGUMENT, f"{request.path!r} is not a folder")
        return {row[-1].removeprefix(folder[-1]).lstrip("/"): row for row in rows}

    async def _look(self, path: str, depth: int = 0) -> list[Any]:
        """Describe a path and what is below it; a link is followed if `depth` is above 0."""
        rows = await self._list(path, depth)
        return await anyio.to_thread.run_sync(lambda: [_entry(row) for row in rows])  # there may be tens of thousands

    async def _list(self, path: str, depth: int, limit: int = LISTING_BYTES) -> list[list[str]]:
        more = [str(depth), "-H" if depth else "-P", FORMAT]
        texts = (await self._run(LOOK, path, more=more, limit=limit)).decode(errors="replace").split("\0")
        if len(texts) < len(FIELDS) or len(texts) % len(FIELDS) != 3:
            raise ConnectError(Code.UNIMPLEMENTED, NOT_GNU)
        *texts, _, passwd, group = texts
        rows = [texts[at : at + len(FIELDS)] for at in range(0, len(texts), len(FIELDS))]
        for column, names in ((OWNER, _names_in(passwd)), (GROUP, _names_in(group))):
            for row in rows:
                row[column] = names.get(row[column], row[column])
        return rows

    async def _run(self, script: str, *paths: str, more: list[str] | None = None, limit: int = LISTING_BYTES) -> bytes:
        if not all(paths):
            raise ConnectError(Code.INVALID_ARGUMENT, "the path is empty")
        sandbox = CURRENT_BOX.get().sandbox
        argv = ["bash", "-c", script, "-", *(absolute(sandbox, path) for path in paths), *(more or [])]
        env = {"LC_ALL": "C"}  # `_failure` reads messages
        try:
            done = await sandbox.exec(argv, cwd="/", env=env, timeout=SECONDS, output_limit=limit)
        except ValueError as error:
            raise ConnectError(Code.INVALID_ARGUMENT, str(error)) from None
        except SandboxError as error:
            raise ConnectError(Code.UNAVAILABLE, str(error)) from error
        if done.timed_out or done.truncated:
            raise ConnectError(Code.FAILED_PRECONDITION, "there are too many files; ask for less at once")
        if done.exit_code and done.stdout[:1] in (b"", b"\0"):  # a folder that may not be read is left out of a listing
            raise _failure(done.exit_code, done.stderr[-1_000:].decode(errors="replace").strip())
        return done.stdout


def _names_in(table: str) -> dict[str, str]:
    """Return the names in /etc/passwd or /etc/group by their ids; of several, the first counts."""
    lines = [line.split(":") for line in table.splitlines()]
    return {fields[2]: fields[0] for fields in reversed(lines) if len(fields) > 2}


def _events(before: Rows, after: Rows, *, with_entry: bool) -> Iterator[Any]:
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if new is None:
            yield Event(name=name, type=Change.REMOVE)
        elif old != new:
            kind = Change.CREATE if old is None else Change.CHMOD if old[3] != new[3] else Change.WRITE
            if kind != Change.WRITE or new[0] != "d":  # a folder's own time only tells of what is in it
                yield Event(name=name, type=kind, **({"entry": _entry(new)} if with_entry else {}))


def _failure(code: int, said: str) -> ConnectError:
    if code == EXISTS:
        return ConnectError(Code.ALREADY_EXISTS, "there is such a folder")
    if code == MISSING or "No such file" in said or "Not a directory" in said:
        return ConnectError(Code.NOT_FOUND, said or "there is no such file or folder")
    return ConnectError(Code.PERMISSION_DENIED if "denied" in said else Code.INVALID_ARGUMENT, said)


def _entry(row: list[str]) -> Any:
    try:
        kind, target_kind, size, mode, permissions, owner, group, time, link, path = row
        return filesystem_pb.EntryInfo(
            name=posixpath.basename(path) or "/",
            type=KINDS.get(target_kind, Kind.SYMLINK if kind == "l" else Kind.UNSPECIFIED),
            path=path,
            size=int(size),
            mode=int(mode, 8),
            permissions=permissions,
            owner=owner,
            group=group,
            modified_time=Timestamp(seconds=min(max(int(time.partition(".")[0]), 0), LAST_SECOND)),
            is_symlink=kind == "l",
            **({"symlink_target": link} if kind == "l" else {}),
        )
    except (ValueError, TypeError):
        raise ConnectError(Code.UNIMPLEMENTED, NOT_GNU) from None

"""Files that programs write and read over HTTP, at `/files`, as streams from one end to the other.

Guarantees: a file is written completely or stays as it was. No more of it is held here than a few pieces, whatever its
size, and no more is read than the settings allow.
"""

from __future__ import annotations

import posixpath
import re
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollout_service.base.errors import RequestError, TooLargeError
from rollout_service.server.e2b.boxes import Box
from rollout_service.server.e2b.files import absolute

MAX_FILES = 1_000
"""The most files of one request."""
PIECE = 64 * 1024
HEAD_BYTES = 16 * 1024
LAST = b"--"
"""Behind the delimiter that ends a form."""
GZIP = 16 + zlib.MAX_WBITS
FILE_NAME = re.compile(rb'; *filename="((?:[^"\\]|\\.)*)"')
BOUNDARY = re.compile(r'multipart/form-data;.*\bboundary="?([^";,\s]{1,70})"?', re.IGNORECASE)


async def read_file(request: Request, box: Box, limit: int) -> Response:
    """Answer with a file.

    Raises:
        RequestError, SandboxError: It cannot be read.
    """
    stream = box.sandbox.read_stream(_path(request.query_params.get("path", "")), limit=limit)
    first = await anext(stream, b"")
    return StreamingResponse(_rest(first, stream), media_type="application/octet-stream")


async def _rest(first: bytes, stream: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(stream):
        yield first
        async for piece in stream:
            yield piece


async def write_files(request: Request, box: Box, limit: int) -> Response:
    """Write the body to a file, or each of its parts to one.

    Raises:
        RequestError, SandboxError: A file cannot be written; those before it are.
    """
    if any(name.startswith("x-metadata-") for name in request.headers):
        raise RequestError("files have no metadata here", hint="Write the file without `metadata`.")
    body = _bounded(_decoded(request), limit)
    given, boundary = request.query_params.get("path", ""), request.headers.get("content-type", "")
    written: list[dict[str, Any]] = []

    async def write(path: str, data: AsyncIterator[bytes]) -> None:
        await box.sandbox.write_stream(_path(path), data)
        whole = absolute(box.sandbox, path)
        written.append({"name": posixpath.basename(whole), "type": "file", "path": whole})

    if (found := BOUNDARY.match(boundary)) is None:
        await write(given, body)
        return JSONResponse(written)
    form = MultipartForm(body, found[1].encode())
    async for name in form.names():
        if len(written) == MAX_FILES:
            raise RequestError(f"a request writes at most {MAX_FILES} files")
        await write(given or name, form.data())
    return JSONResponse(written)


def _path(path: str) -> str:
    if not path or "\0" in path:
        raise RequestError("the path of the file is missing, or no path")
    return path


async def _decoded(request: Request) -> AsyncIterator[bytes]:
    """Yield the body; what is compressed becomes at most `PIECE` bytes at once."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "gzip"):
        raise RequestError(f"the content encoding {encoding[:32]!r} is not gzip")
    unzip = zlib.decompressobj(GZIP)
    async for piece in request.stream():
        if encoding == "identity":
            yield piece
            continue
        try:
            while piece:
                yield unzip.decompress(piece, PIECE)
                piece = unzip.unconsumed_tail
        except zlib.error as error:
            raise RequestError(f"the body is not valid gzip: {error}") from None
    if encoding == "gzip":
        yield unzip.flush()
        if not unzip.eof:
            raise RequestError("the body is not valid gzip: it ends early")


async def _bounded(body: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    size = 0
    async for piece in body:
        size += len(piece)
        if size > limit:
            raise TooLargeError(f"the body is larger than {limit} bytes", hint="Raise `e2b.max_file_bytes`.")
        yield piece


class MultipartForm:
    """The parts of a form with files, one after another."""

    def __init__(self, body: AsyncIterator[bytes], boundary: bytes) -> None:
        self._body = body
        self._delimiter = b"\r\n--" + boundary
        self._buffer = b"\r\n"

    async def names(self) -> AsyncIterator[str]:
        """Yield each part's file name; read its `data` before the next.

        Raises:
            RequestError: The body is no such form.
        """
        async for _ in self.data():
            pass
        while True:
            while len(self._buffer) < len(LAST):
                await self._fill()
            if self._buffer.startswith(LAST):
                return
            name = FILE_NAME.search(await self._until(b"\r\n\r\n"))
            if name is None:
                raise RequestError("a part of the form has no file name")
            text = re.sub(rb"\\(.)", rb"\1", name[1]).replace(b"%22", b'"')
            yield text.decode(errors="replace")

    async def data(self) -> AsyncIterator[bytes]:
        """Yield the bytes of a part."""
        kept = len(self._delimiter) - 1
        while (at := self._buffer.find(self._delimiter)) < 0:
            ready, self._buffer = self._buffer[:-kept], self._buffer[-kept:]
            if ready:
                yield ready
            await self._fill()
        ready, self._buffer = self._buffer[:at], self._buffer[at + len(self._delimiter) :]
        if ready:
            yield ready

    async def _until(self, end: bytes) -> bytes:
        """Take the bytes up to the first end, with it."""
        while (at := self._buffer.find(end)) < 0:
            if len(self._buffer) > HEAD_BYTES:
                raise RequestError("the head of a part is too large")
            await self._fill()
        taken, self._buffer = self._buffer[: at + len(end)], self._buffer[at + len(end) :]
        return taken

    async def _fill(self) -> None:
        piece = await anext(self._body, None)
        if piece is None:
            raise RequestError("the form ends early")
        self._buffer += piece

"""Files that programs write and read over HTTP, at `/files`, as streams from one end to the other.

A file is written completely or stays as it was. Only a few pieces of it are in memory at once, and no more is read than
the settings allow.
"""

from __future__ import annotations

import posixpath
import re
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import anyio.lowlevel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollout_service.base.errors import RequestError, TooLargeError
from rollout_service.server.e2b.boxes import Box
from rollout_service.server.e2b.files import absolute

MAX_FILES = 1_000
PIECE, HEAD_BYTES = 64 * 1024, 16 * 1024
GZIP = 16 + zlib.MAX_WBITS
"""Makes zlib expect gzip."""
FILE_NAME = re.compile(rb'; *filename="((?:[^"\\]|\\.)*)"')
BOUNDARY = re.compile(r'multipart/form-data;.*\bboundary="?([^";,\s]{1,70})"?', re.IGNORECASE)


async def answer_transfer(request: Request, box: Box, limit: int) -> Response:
    """Read a file, or write one or several.

    Raises:
        RequestError, SandboxError: A file cannot be read or written; those before it are written.
    """
    path = request.query_params.get("path", "")
    if request.method == "POST":
        return await _write(request, box, path, _bounded(_decoded(request), limit))
    stream = box.sandbox.read_stream(_checked(path), limit=limit)
    first = await anext(stream, b"")  # raises any error before the response begins
    return StreamingResponse(_rest(first, stream), media_type="application/octet-stream")


async def _rest(first: bytes, stream: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(stream):
        yield first
        async for piece in stream:
            yield piece


async def _write(request: Request, box: Box, path: str, body: AsyncIterator[bytes]) -> Response:
    if any(name.startswith("x-metadata-") for name in request.headers):
        raise RequestError("files have no metadata here", hint="Write the file without `metadata`.")
    written: list[str] = []

    async def write(path: str, data: AsyncIterator[bytes]) -> None:
        await box.sandbox.write_stream(_checked(path), data)
        written.append(absolute(box.sandbox, path))

    found = BOUNDARY.match(request.headers.get("content-type", ""))
    if found is None:
        await write(path, body)
    else:
        form = MultipartForm(body, found[1].encode())
        async for name in form.names():
            if len(written) == MAX_FILES:
                raise RequestError(f"a request writes at most {MAX_FILES} files")
            await write(path or name, form.data())
    return JSONResponse([{"name": posixpath.basename(one), "type": "file", "path": one} for one in written])


def _checked(path: str) -> str:
    if not path or "\0" in path:
        raise RequestError("the path of the file is missing, or is not one")
    return path


async def _decoded(request: Request) -> AsyncIterator[bytes]:
    """Yield the decompressed body, at most `PIECE` bytes at once."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        async for piece in request.stream():
            yield piece
        return
    unzip = zlib.decompressobj(GZIP)
    try:
        async for piece in request.stream():
            left = piece
            while left:
                if unzip.eof:  # the body has several parts, as from `cat a.gz b.gz`
                    unzip = zlib.decompressobj(GZIP)
                    await anyio.lowlevel.checkpoint()  # there may be thousands without content
                yield unzip.decompress(left, PIECE)
                left = unzip.unconsumed_tail or unzip.unused_data
    except zlib.error:
        raise RequestError(f"the body is not valid gzip; its content encoding is {encoding[:32]!r}") from None
    yield unzip.flush()
    if not unzip.eof:
        raise RequestError("the compressed body ends early")


async def _bounded(body: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    size = 0
    async for piece in body:
        size += len(piece)
        if size > limit:
            raise TooLargeError(f"the body is larger than {limit} bytes", hint="Raise `e2b.max_file_bytes`.")
        yield piece


class MultipartForm:
    def __init__(self, body: AsyncIterator[bytes], boundary: bytes) -> None:
        self._body = body
        self._delimiter = b"\r\n--" + boundary
        self._buffer = b"\r\n"

    async def names(self) -> AsyncIterator[str]:
        """Yield each part's file name; read its `data` before the next.

        Raises:
            RequestError: The body is not such a form.
        """
        async for _ in self.data():
            pass
        while not (head := await self._head()).startswith(b"--"):
            if (name := FILE_NAME.search(head)) is None:
                raise RequestError("a part of the form has no file name")
            yield re.sub(rb"\\(.)", rb"\1", name[1]).replace(b"%22", b'"').decode(errors="replace")

    async def data(self) -> AsyncIterator[bytes]:
        kept = len(self._delimiter) - 1
        while (at := self._buffer.find(self._delimiter)) < 0:
            ready, self._buffer = self._buffer[:-kept], self._buffer[-kept:]
            yield ready
            await self._fill()
        ready, self._buffer = self._buffer[:at], self._buffer[at + len(self._delimiter) :]
        yield ready

    async def _head(self) -> bytes:
        """Return the head of the next part, or text that begins with `--` after the last part."""
        while not self._buffer.startswith(b"--") and (at := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > HEAD_BYTES:
                raise RequestError("the head of a part is too large")
            await self._fill()
        if self._buffer.startswith(b"--"):
            return self._buffer
        head, self._buffer = self._buffer[:at], self._buffer[at + 4 :]
        return head

    async def _fill(self) -> None:
        piece = await anext(self._body, None)
        if piece is None:
            raise RequestError("the form ends early")
        self._buffer += piece

"""The tool `browse`: a page as text, fetched from inside the agent's sandbox.

Pages come through the sandbox's network and its list of hosts, never from the service's own network. A page that cannot
be fetched or read is explained to the policy. Size, time and redirects are bounded.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from urllib.parse import urljoin

import anyio.to_thread
import httpx
from pydantic import Field

from rollout_service.agents.tool_calling.tools import (
    Arguments,
    FunctionTool,
    ToolContext,
    ToolInputError,
    with_notes,
)
from rollout_service.agents.web.page_text import page_text
from rollout_service.agents.web.tunnel import HTTP_ERRORS, connection_pool
from rollout_service.episodes import require_sandbox
from sandboxes import Sandbox

PAGE_BYTES = 1024 * 1024
REDIRECTS = 5
NOTE_CHARS = 200
TEXT_TYPES = ("text/", "application/json", "application/xml", "application/xhtml", "application/javascript")
SLOW_CODECS = frozenset({"punycode", "idna"})
"""Their time grows with the square of the length, and a thread cannot be cancelled. They are for host names."""
HEADERS = [
    ("User-Agent", "rollout-service"),
    ("Accept", "text/*, application/json"),
    ("Accept-Encoding", "identity"),
]


class _Browse(Arguments):
    url: str
    start: int = Field(0, ge=0, description="the character to start at")


@dataclass(frozen=True, slots=True)
class _FetchedPage:
    url: str
    status: int
    kind: str
    charset: str
    body: bytes
    truncated: bool
    location: str


async def _browse(arguments: _Browse, context: ToolContext) -> str:
    sandbox = require_sandbox(context.sandbox)
    try:
        page = await _fetch(sandbox, arguments.url, context.seconds)
    except (*HTTP_ERRORS, httpx.InvalidURL, ValueError) as error:
        why = str(error) or type(error).__name__
        raise ToolInputError(f"{arguments.url} cannot be fetched: {why}") from error
    if not page.kind.startswith(TEXT_TYPES):
        what = "an image" if page.kind.startswith("image/") else f"of the type {page.kind}"
        raise ToolInputError(f"{page.url} is {what}; only text can be read")
    text = await anyio.to_thread.run_sync(_readable, page)
    return _window(text, page, arguments.start, context.output_chars)


def _window(text: str, page: _FetchedPage, start: int, limit: int) -> str:
    """Return the part that fits, with notes on the rest."""
    if start and start >= len(text):
        raise ToolInputError(f"the page has {len(text)} characters; start at less")
    notes = [f"[HTTP {page.status}]"] if page.status >= 400 else []
    if page.truncated:
        notes.append(f"[the page is larger than {PAGE_BYTES} bytes; the rest was not read]")
    end = min(len(text), start + max(limit - NOTE_CHARS, NOTE_CHARS // 2))
    if start > 0 or end < len(text):
        notes.append(f"[characters {start} to {end} of {len(text)}; `start` shows others]")
    return with_notes(text[start:end], notes, limit)


async def _fetch(sandbox: Sandbox, url: str, seconds: float) -> _FetchedPage:
    for _ in range(REDIRECTS + 1):
        page = await _get(sandbox, url, seconds)
        if not (page.location and 300 <= page.status < 400):
            return page
        url = urljoin(url, page.location)
    raise ToolInputError(f"more than {REDIRECTS} redirects; the last is to {url}")


async def _get(sandbox: Sandbox, url: str, seconds: float) -> _FetchedPage:
    address = str(httpx.URL(url))  # all in ASCII
    timeout = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
    body = bytearray()
    async with (
        await connection_pool(sandbox, address) as pool,
        pool.stream("GET", address, headers=HEADERS, extensions={"timeout": timeout}) as response,
    ):
        async for chunk in response.aiter_stream():
            body += chunk
            if len(body) > PAGE_BYTES:
                break
    headers = {name.lower(): value.decode("latin-1") for name, value in reversed(response.headers)}
    kind, _, parameters = headers.get(b"content-type", "text/plain").partition(";")
    return _FetchedPage(
        url=url,
        status=response.status,
        kind=kind.strip().lower(),
        charset=parameters.lower().partition("charset=")[2].split(";")[0].strip(" \"'"),
        body=bytes(body[:PAGE_BYTES]),
        truncated=len(body) > PAGE_BYTES,
        location=headers.get(b"location", ""),
    )


def _readable(page: _FetchedPage) -> str:
    try:
        codec = codecs.lookup(page.charset or "utf-8").name
        text = page.body.decode("utf-8" if codec in SLOW_CODECS else codec, errors="replace")
    except (LookupError, ValueError):
        text = page.body.decode(errors="replace")
    return page_text(text, page.url) if "html" in page.kind else text


BROWSE = FunctionTool("browse", "Read a web page as text.", _Browse, _browse, parallel=True)

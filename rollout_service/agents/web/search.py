"""The tool `search`: results of a search service that the environment names, as titles, addresses and excerpts.

Queries go to that one address, never elsewhere by a redirect; its key reaches neither the policy nor the sandbox; size
and time are bounded; a service that fails is a failure of the rollout, never an empty result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import anyio.to_thread
import httpx
from pydantic import BaseModel, ConfigDict, Field, model_validator

from api_schemas.errors import Boundary
from rollout_service.agents.tool_calling.tools import (
    Arguments,
    FunctionTool,
    ToolContext,
    ToolInputError,
    with_notes,
)
from rollout_service.agents.web.page_text import page_text
from rollout_service.agents.web.tunnel import tls_context
from rollout_service.base.errors import ServiceError
from rollout_service.settings.service import is_loopback

NAME: Final = "search"
ANSWER_BYTES: Final = 4 * 1024 * 1024
QUERY_CHARS: Final = 1_000
GET_SECONDS: Final = 30.0
PAUSES: Final = (0.5, 2.0)
"""Seconds before each further attempt."""
_BAD_QUERY: Final = frozenset({400, 413, 414, 422})
"""Statuses with which a service refuses a query."""


class SearchFailedError(ServiceError):
    """The search service cannot be reached, refuses, or gives no answer that can be read."""

    code = "search_failed"
    boundary: ClassVar[Boundary] = Boundary.ENVIRONMENT
    retryable = True


class SearchSettings(BaseModel):
    """`[search]`: the service that answers the tool `search`, and where its answers have what."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(pattern=r"^https?://[^/@?\s]+([/?]\S*)?$")
    """The address of its search, which answers GET with JSON."""
    query: str = Field("q", min_length=1)
    """The name of the parameter that has the query."""
    parameters: dict[str, str] = {}
    """More parameters of every request, such as `format = "json"`."""
    key_file: Path | None = None
    """A file of the service's machine with a key, which every request carries."""
    key_header: str = Field("Authorization", pattern=r"^[A-Za-z0-9-]+$")
    """The header that has the key; in `Authorization`, `Bearer` stands before it."""
    results: str = "results"
    """Where the list of results is: keys with dots between them, such as `web.results`."""
    title: str = "title"
    """The key of a result's title."""
    link: str = "url"
    """The key of a result's address."""
    text: str = "content"
    """The key of a result's excerpt."""
    max_results: int = Field(5, ge=1, le=50)
    """How many results the policy sees."""

    @property
    def host(self) -> str:
        return httpx.URL(self.url).netloc.decode()

    @model_validator(mode="after")
    def _key_file_is_absolute(self) -> Self:
        if self.key_file is not None and not self.key_file.is_absolute():
            raise ValueError("`key_file` must be an absolute path")
        return self


class _Search(Arguments):
    query: str = Field(min_length=1, max_length=QUERY_CHARS)


def search_tool(settings: SearchSettings) -> FunctionTool[_Search]:
    async def search(arguments: _Search, context: ToolContext) -> str:
        entries = await _ask(settings, arguments.query, context.seconds)
        return with_notes("\n\n".join(entries) or "no results", [], context.output_chars)

    return FunctionTool(NAME, "Search the web.", _Search, search, parallel=True)


async def _ask(settings: SearchSettings, query: str, seconds: float) -> list[str]:
    headers = await anyio.to_thread.run_sync(_headers, settings)
    try:
        with anyio.fail_after(seconds):
            body = await _get_patiently(settings, query, headers)
            return await anyio.to_thread.run_sync(_entries, settings, body)  # some services return whole pages
    except TimeoutError:
        raise _failed(settings, f"gave no answer within {seconds:g} s") from None
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if status in _BAD_QUERY:
            raise ToolInputError(f"the search service does not take this query (HTTP {status})") from error
        raise _failed(settings, f"answered HTTP {status}") from error
    except (httpx.HTTPError, ValueError, RecursionError, ImportError) as error:  # the last: a proxy needs a package
        raise _failed(settings, f"gave no usable answer: {str(error) or type(error).__name__}") from error


async def _get_patiently(settings: SearchSettings, query: str, headers: dict[str, str]) -> bytes:
    """Try again after temporary failures."""
    for seconds in PAUSES:
        try:
            return await _get(settings, query, headers)
        except httpx.HTTPError as error:
            if not _may_pass(error):
                raise
        await anyio.sleep(seconds)
    return await _get(settings, query, headers)


async def _get(settings: SearchSettings, query: str, headers: dict[str, str]) -> bytes:
    parameters = {**settings.parameters, settings.query: query}
    url = httpx.URL(settings.url).copy_merge_params(parameters)
    context = await anyio.to_thread.run_sync(tls_context)
    body = bytearray()
    async with (
        httpx.AsyncClient(
            headers=headers, timeout=GET_SECONDS, verify=context, trust_env=not is_loopback(url.host)
        ) as client,
        client.stream("GET", url) as response,
    ):
        if not response.is_success:
            response.raise_for_status()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > ANSWER_BYTES:
                raise ValueError(f"it is longer than {ANSWER_BYTES} bytes")
    return bytes(body)


def _headers(settings: SearchSettings) -> dict[str, str]:
    headers = {"Accept": "application/json", "User-Agent": "rollout-service"}
    if settings.key_file is None:
        return headers
    try:
        key = settings.key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SearchFailedError(
            f"the key of the search service cannot be read: {error}",
            hint="Set `key_file` of [search] to a file that the service can read on every node.",
        ) from error
    bearer = settings.key_header.lower() == "authorization"
    return {**headers, settings.key_header: f"Bearer {key}" if bearer else key}


def _may_pass(error: httpx.HTTPError) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)


def _entries(settings: SearchSettings, body: bytes) -> list[str]:
    return [_entry(settings, one) for one in _found(settings, json.loads(body))[: settings.max_results]]


def _found(settings: SearchSettings, answer: Any) -> list[dict[str, Any]]:
    for key in settings.results.split(".") if settings.results else []:
        answer = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(answer, list):
        raise _failed(settings, f"has no list at {settings.results!r} in its answer")
    return [one for one in answer if isinstance(one, dict)]


def _entry(settings: SearchSettings, result: dict[str, Any]) -> str:
    link = str(result.get(settings.link) or "")
    title, text = (
        page_text(str(result.get(key) or ""), link).replace("\n", " ") for key in (settings.title, settings.text)
    )
    return "\n".join(line for line in (title, link, text) if line)


def _failed(settings: SearchSettings, what: str) -> SearchFailedError:
    return SearchFailedError(
        f"the search service at {settings.host} {what}",
        hint="Check [search] in environment.toml, and that this node reaches the service.",
    )

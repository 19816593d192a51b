"""Requests to one server, repeated while it cannot be reached or cannot take them.

A request is repeated with back-off for at most `patience_seconds`, counted from its first failure; a cancelled request
closes its connection.
"""

from __future__ import annotations

import logging
import random
import re
import ssl
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from ipaddress import ip_address
from math import inf
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import anyio
import httpx
from pydantic import BaseModel

from api_schemas.errors import Problem
from api_schemas.nodes import Readiness
from rollout_client._answers import error_from, parse, readiness_from
from rollout_client._download import LargeBody
from rollout_client.errors import (
    AddressError,
    CaFileError,
    InvalidRequestError,
    KeyFormatError,
    ProtocolError,
    ProxySettingsError,
    UnavailableError,
    UnreachableError,
)

log = logging.getLogger("rollout_client")

T = TypeVar("T")
Receive = Callable[[httpx.Response], Awaitable[object]]
Query: TypeAlias = Mapping[str, str | float | Sequence[str] | None]
"""The parameters of a request; one that is None is left out."""

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
TELL_SECONDS = 2.0
"""After how long a call that is repeated says so in the log; a restart takes less."""
TELL_AGAIN_SECONDS = 30.0
FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 5.0
_KEY = re.compile(r"[!-~]+")


class Connection:
    def __init__(
        self,
        base_url: str,
        key: str | None,
        *,
        patience_seconds: float,
        ca_file: str | Path | None,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self.base_url = _checked(base_url).rstrip("/")
        self.patience_seconds = patience_seconds
        self._context = _trusting(ca_file)
        proxy = find_proxy(httpx.URL(self.base_url)) if transport is None else None
        with _explaining(proxy):
            self.http = httpx.AsyncClient(
                base_url=self.base_url,
                headers=authorization(key),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
                transport=transport,
                verify=self._context,
                proxy=proxy,
                trust_env=False,  # `find_proxy` has looked at it
            )
        self._direct = transport is None and proxy is None
        self._told_at = -inf
        """When this last said in the log that it repeats a call; hundreds may wait for one server."""
        self._through = "" if proxy is None else f" through {_described(proxy)}"

    async def call(
        self,
        model: type[T] | None,
        method: str,
        path: str,
        body: object = None,
        *,
        params: Query | None = None,
        seconds: float = ANSWER_SECONDS,
        wait_seconds: float = 0.0,
    ) -> T:
        """Send a request and parse the response as `model`; None takes any JSON.

        `wait_seconds` is how long the server is asked to wait before it answers; it is added to `seconds`.

        Raises:
            ClientError: The request failed, as for `send`, or the response is of another type.
        """
        params = {**(params or {}), "wait": f"{wait_seconds:g}" if wait_seconds > 0 else None}
        response = await self.send(method, path, body, params=params, seconds=seconds + wait_seconds)
        return parse(cast("type[T]", Any) if model is None else model, response.content or b"null")

    async def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: Query | None = None,
        seconds: float = ANSWER_SECONDS,
        headers: dict[str, str] | None = None,
        receive: Receive | None = None,
        into: LargeBody | None = None,
    ) -> httpx.Response:
        """Send a request until it is answered, and return the response if it is a success.

        `receive` reads the body, from the start again if the connection breaks; `into` receives a large one.

        Raises:
            UnreachableError: The patience ends without a response.
            ProblemError: The server refuses the request, or a text in it cannot be sent.
            ProtocolError: The response is not one of this API.
        """
        with _refusing_surrogates():
            request = self.http.build_request(
                method,
                path,
                json=body.model_dump(mode="json") if isinstance(body, BaseModel) else body,
                params={name: value for name, value in (params or {}).items() if value is not None},
                headers=headers,
                timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS),
            )
        patience = self.patience()
        while True:
            try:
                if into is not None and self._direct:
                    response = await into.fetch(
                        request, connect_seconds=CONNECT_SECONDS, seconds=seconds, context=self._context
                    )
                else:
                    response = await self._receive(request, into.receive if into is not None else receive)
                if not response.is_success:
                    raise error_from(response)
            except (httpx.TransportError, UnavailableError) as error:
                await patience.wait(error)
            else:
                return response

    async def readiness(self) -> Readiness:
        """Ask once whether the service can take work.

        Raises:
            UnreachableError: Nothing answers.
            ClientError: The answer says nothing about readiness.
        """
        try:
            response = await self.http.get("/ready")
        except httpx.TransportError as error:
            raise UnreachableError(f"no answer from {self.base_url}{self._through}: {error}") from error
        return readiness_from(response)

    def stream(
        self, path: str, headers: dict[str, str], *, seconds: float
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """Open a stream once; `seconds` is how long it may be silent."""
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        return self.http.stream("GET", path, headers=headers, timeout=timeout)

    async def lines(self, path: str, params: list[tuple[str, str]]) -> AsyncGenerator[bytes]:
        """Yield the lines of a long response as they arrive; the request is repeated until the first has.

        Raises:
            ClientError: The request failed, as for `send`.
            ProtocolError: The response was cut off.
        """
        patience, rest = self.patience(), b""
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        while True:
            begun = False
            try:
                async with self.http.stream(
                    "GET", path, params=httpx.QueryParams(tuple(params)), timeout=timeout
                ) as response:
                    if not response.is_success:
                        await response.aread()
                        raise error_from(response)
                    async for piece in response.aiter_bytes():
                        begun = True
                        *lines, rest = (rest + piece).split(b"\n")
                        for line in lines:
                            yield line
                    return
            except (httpx.TransportError, UnavailableError) as error:
                if begun:
                    raise ProtocolError("the response was cut off; the request can be repeated") from error
                await patience.wait(error)

    def patience(self) -> Patience:
        return Patience(self.base_url + self._through, self.patience_seconds, self._tell)

    def _tell(self, reason: str, left: float) -> None:
        now = anyio.current_time()
        if now - self._told_at >= TELL_AGAIN_SECONDS:
            self._told_at = now
            log.warning("%s: %s; trying again for %.0f s", self.base_url + self._through, reason, left)

    async def _receive(self, request: httpx.Request, receive: Receive | None) -> httpx.Response:
        response = await self.http.send(request, stream=True)
        try:
            read = receive if receive is not None and response.is_success else httpx.Response.aread
            await read(response)
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()
        return response


def _trusting(ca_file: str | Path | None) -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(cafile=ca_file)
        except OSError as error:
            raise CaFileError(
                f"the file of CA certificates {str(ca_file)!r} cannot be used: {error.strerror or error}. Name a PEM "
                "file that this process can read, as `ca_file` or in ROLLOUT_CA_FILE"
            ) from error
    return context


def authorization(key: str | None) -> dict[str, str]:
    """Return the header for a key, which may end in a line break if it comes from a file.

    Raises:
        KeyFormatError: It cannot be sent.
    """
    if not key:
        return {}
    if not _KEY.fullmatch(key := key.strip()):
        raise KeyFormatError(
            "the key has a space, a line break or another character that no key has; see where it was read from"
        )
    return {"authorization": f"Bearer {key}"}


@contextmanager
def _refusing_surrogates() -> Iterator[None]:
    """Refuse what the service would: JSON files can hold half of a surrogate pair, such as that of a cut emoji."""
    try:
        yield
    except UnicodeEncodeError as error:
        text = error.object[max(0, error.start - 30) : error.end]
        detail = f"the text that ends in {text!r} has half of a surrogate pair, which UTF-8 cannot encode; remove it"
        problem = Problem(title="Invalid text", status=400, detail=detail, code="malformed_json")
        raise InvalidRequestError(problem) from error


def _checked(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise AddressError(f"{base_url!r} is not a URL: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise AddressError(f"{base_url!r} is not the URL of a server. Name it as in http://127.0.0.1:8080")
    return base_url


def find_proxy(url: httpx.URL) -> str | None:
    """Return the environment's proxy, if any; never for this machine's own addresses, which it cannot reach."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if not proxy or _is_loopback(url.host) or urllib.request.proxy_bypass(url.netloc.decode()):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@contextmanager
def _explaining(proxy: str | None) -> Iterator[None]:
    """Turn the errors of a client that cannot use this proxy into one that says so."""
    try:
        yield
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        if proxy is None:
            raise
        raise ProxySettingsError(f"{_described(proxy)} cannot be used: {error}") from error


def _described(proxy: str) -> str:
    """Describe a proxy of the environment, without its password."""
    return f"the proxy {proxy.rpartition('@')[2]} of the environment (name the server in NO_PROXY to avoid it)"


class Patience:
    """The back-off of one request: random pauses that double up to a limit.

    The time is counted from the first failure, since a request may have waited long before the server went away.
    """

    def __init__(self, address: str, seconds: float, tell: Callable[[str, float], None]) -> None:
        """`tell` gets the reason and the seconds left, before each pause of a call that has failed for long."""
        self._address = address
        self._tell = tell
        self._seconds = seconds
        self._deadline: float | None = None
        self._pause = FIRST_BACKOFF_SECONDS

    async def wait(self, error: httpx.TransportError | UnavailableError) -> None:
        """Pause before the next try.

        Raises:
            UnreachableError: The time is up and the server could not be reached.
            UnavailableError: `error` itself, if the time is up.
        """
        now = anyio.current_time()
        if self._deadline is None:
            self._deadline = now + self._seconds
        left, reason = self._deadline - now, str(error) or type(error).__name__
        if left <= 0:
            if isinstance(error, UnavailableError):
                raise error
            raise UnreachableError(f"no answer from {self._address}: {reason}") from error
        if self._seconds - left >= TELL_SECONDS:
            self._tell(reason, left)
        pause = random.uniform(0.5, 1.0) * self._pause  # noqa: S311 - spreads clients, keeps no secret
        if isinstance(error, UnavailableError):
            pause = max(pause, random.uniform(1.0, 1.5) * error.retry_after)  # noqa: S311 - the same
        self._pause = min(2.0 * self._pause, LAST_BACKOFF_SECONDS)
        await anyio.sleep(min(pause, left))

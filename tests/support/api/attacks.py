"""Attacks on the API, as checks that any runner can call against a listening server.

    python -m tests.support.api.attacks URL ADMIN_KEY READ_KEY SUBMIT_KEY

A check raises if its attack succeeded, or if the server does not answer its probe within seconds afterwards. `attack`
tries all of them, one after the other.
"""

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import anyio
import httpx
from anyio.abc import SocketStream

from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Replies, ScriptedEngine

PATIENCE = 60.0
PROBE_SECONDS = 3.0
HUGE = "9" * 400
FLOOD = 1_200
"""More connections than a server with few descriptors may open."""
MODEL = policy_folder("calc-tuned")
ORDERS = ("/stop", "/v1/abort", "/v1/pause", "/v1/resume", "/start", "/clear_llm_server")


class Target(NamedTuple):
    """A server, and a key of each role."""

    url: str
    admin: str
    read: str
    submit: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one attack."""

    name: str
    held: bool
    why: str = ""


Check = Callable[[Target], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check."""
    CHECKS[function.__name__] = function
    return function


async def attack(target: Target, names: Sequence[str] = ()) -> AsyncIterator[Outcome]:
    """Try the named attacks, or all of them."""
    for name in names or CHECKS:
        try:
            with anyio.fail_after(PATIENCE):
                await CHECKS[name](target)
                await is_well(target)
        except Exception as error:  # noqa: BLE001  any exception means that the API did not hold
            yield Outcome(name, held=False, why=f"{type(error).__name__}: {error}")
        else:
            yield Outcome(name, held=True)


# -- tools ---------------------------------------------------------------------


async def connect(target: Target) -> SocketStream:
    parts = urlsplit(target.url)
    return await anyio.connect_tcp(str(parts.hostname), int(parts.port or 80))


async def raw(target: Target, data: bytes) -> bytes:
    """Return the server's answer to these bytes, until it closes the connection or is silent for two seconds."""
    async with await connect(target) as stream:
        answer = b""
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
            await stream.send(data)
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream), anyio.move_on_after(2):
            while True:
                answer += await stream.receive()
        return answer


def statuses(answer: bytes) -> list[int]:
    return [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


def client(target: Target, key: str | None = None) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=target.url, headers=headers, timeout=30)


async def is_well(target: Target) -> None:
    """Raise if the server does not answer its probe in time."""
    began = time.monotonic()
    async with client(target) as http:
        assert (await http.get("/health")).status_code == 200
    assert time.monotonic() - began < PROBE_SECONDS, "the probe was late"


async def refuses(target: Target, data: bytes, *allowed: int) -> None:
    """Raise unless there is exactly one answer, with one of these statuses."""
    found = statuses(await raw(target, data))
    assert len(found) == 1, found
    assert found[0] in allowed, found


def head(target: Target, line: str = "GET /v1/runs HTTP/1.1", *headers: str) -> bytes:
    return "\r\n".join([line, f"Host: {urlsplit(target.url).netloc}", *headers, "", ""]).encode()


def keyed(target: Target, line: str, *headers: str) -> bytes:
    return head(target, line, f"Authorization: Bearer {target.admin}", *headers)


# -- heads, bodies, connections ------------------------------------------------


@check
async def oversized_head(target: Target) -> None:
    """A header of a megabyte is refused."""
    await refuses(target, head(target, "GET /health HTTP/1.1", f"X: {'x' * 1_000_000}"), 431)


@check
async def oversized_target(target: Target) -> None:
    """A path of a megabyte is refused."""
    await refuses(target, head(target, f"GET /{'x' * 1_000_000} HTTP/1.1"), 431)


@check
async def too_many_headers(target: Target) -> None:
    """A thousand small headers are refused."""
    await refuses(target, head(target, "GET /health HTTP/1.1", *["a: b"] * 1_000), 431)


@check
async def endless_header_lines(target: Target) -> None:
    """A connection that never stops sending header lines is closed, and the probe is answered meanwhile."""
    async with await connect(target) as stream:
        await stream.send(head(target, "GET /health HTTP/1.1")[:-2])
        with suppress(anyio.BrokenResourceError):
            for _ in range(200):
                await stream.send(b"x: y\r\n" * 50)
                await is_well(target)
            raise AssertionError("it goes on taking headers")


@check
async def half_sent_heads(target: Target) -> None:
    """Requests that stop in their heads delay nobody, however many there are."""
    async with AsyncExitStack() as stack:
        for _ in range(FLOOD):
            with suppress(OSError, anyio.BrokenResourceError):
                stream = await stack.enter_async_context(await connect(target))
                await stream.send(b"GET /health HTTP/1.1\r\nHo")
        await is_well(target)


@check
async def slow_bodies(target: Target) -> None:
    """Bodies that never arrive delay nobody, however many there are, even if the requests have a key."""
    lines = ["Content-Type: application/json", "Content-Length: 1000"]
    async with AsyncExitStack() as stack:
        for _ in range(FLOOD):
            with suppress(OSError, anyio.BrokenResourceError):
                stream = await stack.enter_async_context(await connect(target))
                await stream.send(keyed(target, "POST /v1/rollouts HTTP/1.1", *lines) + b"{")
        await is_well(target)


@check
async def connection_flood(target: Target) -> None:
    """Silent connections leave room for callers with a key, however many there are."""
    async with AsyncExitStack() as stack:
        for _ in range(FLOOD):
            with suppress(OSError):
                await stack.enter_async_context(await connect(target))
        await is_well(target)
        async with client(target, target.admin) as http:
            assert (await http.get("/v1/runs")).status_code == 200


@check
async def pipelining(target: Target) -> None:
    """Ten thousand requests in one write are not all kept."""
    answer = await raw(target, head(target, "GET /health HTTP/1.1") * 10_000)
    assert answer.count(b"HTTP/1.1 200") < 1_000


@check
async def endless_trailers(target: Target) -> None:
    """Trailers of a chunked body have the same limits as its head."""
    start = keyed(target, "POST /v1/rollouts HTTP/1.1", "Transfer-Encoding: chunked")
    await raw(target, start + b"0\r\n" + b"a: b\r\n" * 200_000)


# -- framing -------------------------------------------------------------------


@check
async def two_lengths(target: Target) -> None:
    """A body whose length is ambiguous is refused."""
    for lines, body in (
        (["Content-Length: 3", "Transfer-Encoding: chunked"], b"0"),
        (["Content-Length: 3", "Content-Length: 4"], b"0"),
        (["Transfer-Encoding: chunked", "Transfer-Encoding: identity"], b"0"),
        (["Transfer-Encoding: chunked"], b"zz"),
        (["Content-Length: +3"], b"0"),
        (["Content-Length: -1"], b"0"),
        (["Transfer-Encoding : chunked"], b"0"),
    ):
        data = keyed(target, "POST /v1/rollouts HTTP/1.1", *lines) + body + b"\r\n\r\nGET /v1/runs HTTP/1.1\r\n\r\n"
        await refuses(target, data, 400)


@check
async def duplicate_headers(target: Target) -> None:
    """A second Host or Authorization is refused."""
    await refuses(target, head(target, "GET /health HTTP/1.1", "Host: other"), 400)
    await refuses(target, keyed(target, "GET /v1/runs HTTP/1.1", "Authorization: Bearer x"), 400)


@check
async def trailer_with_a_key(target: Target) -> None:
    """A key in a trailer opens nothing."""
    start = head(target, "POST /v1/abort HTTP/1.1", "Transfer-Encoding: chunked", "Connection: close")
    data = start + f"0\r\nAuthorization: Bearer {target.admin}\r\n\r\n".encode()
    assert statuses(await raw(target, data)) == [401]


@check
async def another_targets_host(target: Target) -> None:
    """A target in absolute form for another host is refused, and so are CONNECT and foreign protocols."""
    await refuses(target, head(target, "GET http://evil.example/health HTTP/1.1"), 400)
    await refuses(target, head(target, "CONNECT evil.example:80 HTTP/1.1"), 400)
    await refuses(target, b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(64), 400)
    await refuses(target, b"GET /health HTTP/1.1\r\n\r\n", 400)


@check
async def old_http(target: Target) -> None:
    """HTTP/1.0 requests need a key too."""
    answer = await raw(target, b"GET /v1/runs HTTP/1.0\r\n\r\n")
    assert b" 401 " in answer.splitlines()[0]


@check
async def websocket_past_the_keys(target: Target) -> None:
    """An upgrade does not bypass the keys."""
    upgrade = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    answer = await raw(target, head(target, "GET /v1/events HTTP/1.1", *upgrade, "Sec-WebSocket-Key: AAAA"))
    assert statuses(answer) == [401]


# -- keys and roles ------------------------------------------------------------


@check
async def wrong_keys(target: Target) -> None:
    """Near misses of a key open nothing, and no answer shows a key."""
    near = [target.admin[:-1], target.admin + "x", target.admin.swapcase(), "null", f"{target.admin} x"]
    async with client(target) as http:
        for value in [*(f"Bearer {key}" for key in near), target.admin, f"Basic {target.admin}", "Bearer"]:
            answer = await http.get("/v1/runs", headers={"authorization": value})
            assert answer.status_code == 401, value
            assert target.admin not in answer.text
        for place in (f"/v1/runs?key={target.admin}", f"/v1/runs?access_token={target.admin}"):
            assert (await http.get(place)).status_code == 401


@check
async def timing_of_keys(target: Target) -> None:
    """Checking a key with a correct beginning takes as long as one without, within the noise of the network."""
    async with client(target) as http:

        async def middle(key: str) -> float:
            times = []
            for _ in range(60):
                began = time.perf_counter()
                await http.get("/v1/runs", headers={"authorization": f"Bearer {key}"})
                times.append(time.perf_counter() - began)
            return sorted(times)[len(times) // 2]

        right = await middle(target.admin[:-1] + "\x7e")
        wrong = await middle("\x7e" + target.admin[1:])
        assert 0.2 < right / wrong < 5


@check
async def escalation_of_roles(target: Target) -> None:
    """A key allows nothing beyond its role, on any path that changes something."""
    async with client(target, target.read) as reader, client(target, target.submit) as trainer:
        for path in (*ORDERS, "/v1/backends", "/v1/weights", "/add_llm_server", "/v1/nodes"):
            for http in (reader, trainer):
                for headers in ({}, {"x-http-method-override": "GET"}, {"x-original-url": "/health"}):
                    assert (await http.post(path, headers=headers)).status_code == 403, path
        for path in ("/v1/rollouts", "/v1/runs", "/process", "/cancel"):
            assert (await reader.post(path, json={})).status_code == 403, path
        assert (await reader.get("/v1/runs")).status_code == 200


@check
async def escalation_by_the_path(target: Target) -> None:
    """No escape sequence in a path gives it another role."""
    for path in (
        "/v1/rollouts/../weights",
        "/v1/rollouts/%2e%2e/weights",
        "//v1/weights",
        "/v1/runs/..;/weights",
    ):
        data = head(target, f"POST {path} HTTP/1.1", f"Authorization: Bearer {target.submit}", "Connection: close")
        assert statuses(await raw(target, data))[0] in {400, 403, 404, 405, 422}, path


@check
async def orders_of_web_pages(target: Target) -> None:
    """A page from another site changes nothing, even with a key."""
    async with client(target, target.admin) as http:
        for path in ORDERS:
            for headers in (
                {"origin": "http://evil.example"},
                {"origin": "null"},
                {"sec-fetch-site": "cross-site"},
            ):
                assert (await http.post(path, headers=headers)).status_code == 403, path
            for kind in (
                "text/plain",
                "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=x",
            ):
                answer = await http.post(path, content=b"{}", headers={"content-type": kind})
                assert answer.status_code == 415, path
        allowed = await http.options("/v1/runs", headers={"origin": "http://evil.example"})
        assert "access-control-allow-origin" not in allowed.headers


# -- contents of requests ------------------------------------------------------


@check
async def traversal(target: Target) -> None:
    """No path leads to a file."""
    paths = (
        "/docs/../../etc/passwd",
        "/docs/%2e%2e%2f%2e%2e%2fetc/passwd",
        "/..%2f..%2fetc/passwd",
        "/docs/%00",
    )
    for path in paths:
        answer = await raw(target, keyed(target, f"GET {path} HTTP/1.1", "Connection: close"))
        assert statuses(answer)[0] in {400, 404, 422}, path
        assert b"root:" not in answer


@check
async def bombs(target: Target) -> None:
    """A compressed body is not unpacked, and one that is too large is not read."""
    bomb = gzip.compress(bytes(64 << 20))
    async with client(target, target.admin) as http:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = await http.post("/v1/rollouts", content=bomb, headers=headers)
        assert 400 <= answer.status_code < 500
        headers = {"content-type": "application/json", "content-length": HUGE[:15]}
        start = keyed(target, "POST /v1/rollouts HTTP/1.1", *(f"{a}: {b}" for a, b in headers.items()))
        assert statuses(await raw(target, start))[0] == 413


@check
async def deep_nesting(target: Target) -> None:
    """Endless brackets give a bad request, not a crash."""
    async with client(target, target.admin) as http:
        for depth in (100, 250, 100_000):
            for opening, closing in (("[", "]"), ('{"a":', "}")):
                inner = opening * depth + "1" + closing * depth
                body = f'{{"task": {{"environment": "calc", "instance": {{"x": {inner}}}}}}}'
                answer = await http.post("/v1/rollouts", content=body, headers={"content-type": "application/json"})
                assert 400 <= answer.status_code < 500 or answer.status_code == 503, (
                    depth,
                    answer.text[:200],
                )
                assert "Traceback" not in answer.text


@check
async def huge_numbers(target: Target) -> None:
    """Numbers beyond 64 bits, and values that are not numbers, are bad fields."""
    async with client(target, target.admin) as http:
        for value in (HUGE, "1e400", "-1e400", "NaN", "Infinity", "true"):
            body = f'{{"task": {{"environment": "calc"}}, "sampling": {{"temperature": {value}, "top_k": {value}}}}}'
            answer = await http.post("/v1/rollouts", content=body, headers={"content-type": "application/json"})
            assert answer.status_code in {400, 422}, (value, answer.text[:200])
        for query in (f"limit={HUGE}", f"limit=-{HUGE}", "limit=1e9"):
            assert (await http.get(f"/v1/rollouts?{query}")).status_code == 422


@check
async def hostile_strings(target: Target) -> None:
    """Quotes, control characters, lone surrogates and templates come back as data, if at all."""
    async with client(target, target.admin) as http:
        for text in (
            "'; DROP TABLE rollouts; --",
            "{{7*7}}",
            "\u2028<script>",
            "\x1b[31m",
            "a\x00b",
            "../../x",
        ):
            answer = await http.post("/v1/rollouts", json={"task": {"environment": text}, "rollout_id": text})
            assert answer.status_code == 422, text
        body = json.dumps({"task": {"environment": "\ud800"}})
        answer = await http.post("/v1/rollouts", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in {400, 422}


@check
async def files_of_the_host(target: Target) -> None:
    """A key that may only submit makes no run read a file of the service's machine, and learns of none."""
    engine = ScriptedEngine(Replies.from_texts(["No."], MODEL), model_path=MODEL, vocab_size=512)
    with tempfile.TemporaryDirectory() as folder:
        secret, link = anyio.Path(folder, "secret.jsonl"), anyio.Path(folder, "link.jsonl")
        await secret.write_text('{"question": "SECRET", "answer": "1"}\n')
        await link.symlink_to(secret)
        async with engine, client(target, target.admin) as admin, client(target, target.submit) as http:
            added = await admin.post("/v1/backends", json={"url": engine.url})
            assert added.status_code in {200, 201}, added.text
            for path in (secret, link, folder + "/none.jsonl", "~/none.jsonl", "/proc/self/environ.jsonl"):
                source = {"kind": "file", "path": str(path), "environment": "math"}
                body = {"source": source, "group_size": 1, "batch_size": 1}
                answer = await http.post("/v1/runs", json=body)
                assert answer.status_code == 422, (path, answer.text)
                assert "data_dirs" in answer.text
                assert "No such file" not in answer.text
            assert "SECRET" not in (await http.get("/v1/rollouts")).text
            await admin.delete(f"/v1/backends/{added.json()['backend_id']}")


def main() -> int:
    """Try all attacks on one server; return 1 if one succeeded, as the exit code."""
    parser = argparse.ArgumentParser()
    for name in Target._fields:
        parser.add_argument(name)
    target = Target(**vars(parser.parse_args()))
    broken = 0

    async def run() -> None:
        nonlocal broken
        async for outcome in attack(target):
            broken += not outcome.held
            verdict = "held" if outcome.held else "BROKEN"
            sys.stdout.write(f"{verdict} {outcome.name} {outcome.why}\n")

    anyio.run(run)
    return min(broken, 1)


if __name__ == "__main__":
    raise SystemExit(main())

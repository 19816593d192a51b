"""Bodies of requests and answers are bounded and whole, and nothing in between changes them."""

import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import httpx
import pytest
from fastapi._compat import ModelField
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message
from structlog.testing import capture_logs

from rollout_service.base.errors import TooManyBytesError
from rollout_service.http.problems import MAX_ERRORS
from rollout_service.http.requests import BodiesInFlight, HeldBytes
from rollout_service.server.api.app import create_app
from rollout_service.server.api.middleware import SMALL_BODY_BYTES
from rollout_service.server.api.routes.support.route import MAX_CONTAINERS, MAX_MEMBERS
from rollout_service.server.api.routes.support.shared_answers import MAX_BUFFERED_CHUNKS, BufferedResponse
from rollout_service.settings import load_settings
from tests.support.waiting import until

MOST, LARGEST = 1_000, 100
STEPS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, LARGEST), st.booleans()), max_size=60)


@given(STEPS)
async def test_a_sender_is_given_no_more_than_is_left_for_the_others(steps):
    bodies = BodiesInFlight(MOST, LARGEST, wait_seconds=0)
    held: list[tuple[str, int, HeldBytes]] = []
    for owner, size, ends in steps:
        body = bodies.reading(owner)
        own = sum(each for one, each, _ in held if one == owner) + size
        left = MOST - sum(each for _, each, _ in held) - size
        try:
            await body.grow_to(size)
        except TooManyBytesError:
            assert own > left
        else:
            assert own <= left
            held.append((owner, size, body))
        if ends and held:
            held.pop(0)[2].release()
    for _, _, body in held:
        body.release()
    await bodies.reading("a").grow_to(MOST // 2)


async def test_a_body_waits_for_room_and_is_told_to_come_back_if_there_is_none():
    bodies = BodiesInFlight(100, 50, wait_seconds=3_600)
    first, second, small = bodies.reading("a"), bodies.reading("a"), bodies.reading("b")
    await first.grow_to(50)
    await small.grow_to(20)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second.grow_to, 40)
        await anyio.wait_all_tasks_blocked()
        first.release()
    impatient = BodiesInFlight(100, 50, wait_seconds=0)
    await impatient.reading("a").grow_to(50)
    with pytest.raises(TooManyBytesError) as told:
        await impatient.reading("a").grow_to(1)
    assert (told.value.status, told.value.retry_after) == (429, 1)


async def test_a_body_of_the_api_is_told_to_come_back(monkeypatch):
    monkeypatch.setattr("rollout_service.http.requests.WAIT_SECONDS", 0)
    app = create_app(load_settings(max_body_bytes=1_024, http={"max_bytes_in_flight": 1_024}))

    async def never_ends() -> AsyncIterator[bytes]:
        yield b"x" * 1_000
        began.set()
        await anyio.sleep_forever()

    began = anyio.Event()
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        async with anyio.create_task_group() as tasks:
            first = lambda: http.post("/v1/rollouts", content=never_ends(), headers=headers)  # noqa: E731
            tasks.start_soon(first)
            await began.wait()
            refused = await http.post("/v1/rollouts", content=b" " * 1_000, headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_bytes")
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["retryable"]
            tasks.cancel_scope.cancel()
        assert (await http.post("/v1/rollouts", content=b" " * 1_000, headers=headers)).status_code == 400


async def test_a_body_that_waits_to_be_parsed_still_takes_its_room(monkeypatch):
    monkeypatch.setattr("rollout_service.http.requests.WAIT_SECONDS", 0)
    begun, goes_on = threading.Event(), threading.Event()

    def parse(*_: object) -> None:
        begun.set()
        goes_on.wait(60)
        raise ValueError("enough")

    large = "rollout_service.server.api.routes.support.route._parse_large"
    monkeypatch.setattr(large, parse)
    app = create_app(load_settings(max_body_bytes=100_000, http={"max_bytes_in_flight": 200_000}))
    answers: list[int] = []

    async def post() -> None:
        headers = {"content-type": "application/json"}
        answers.append((await http.post("/v1/rollouts", content=b" " * 70_000, headers=headers)).status_code)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post)
            await until(begun.is_set)
            monkeypatch.setattr(large, lambda body, _: json.loads(body))
            await post()
            goes_on.set()
        await post()
    assert answers == [429, 400, 400]


@pytest.mark.parametrize(
    "values",
    [[{}] * (MAX_CONTAINERS + 1), [[]] * (MAX_CONTAINERS + 1), dict.fromkeys(map(str, range(MAX_MEMBERS + 1)))],
    ids=["objects", "lists", "members"],
)
async def test_a_body_that_would_take_many_times_its_size_is_refused(values):
    app = create_app(load_settings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        body = json.dumps({"metadata": {"x": values}})
        headers = {"content-type": "application/json"}
        refused = await http.post("/v1/rollouts", content=body, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (413, "request_entity_too_large")


@pytest.mark.parametrize(
    ("path", "most", "status"),
    [
        ("/v1/rollouts", 2**23, 422),
        ("/v1/runs/a/tasks", 2**23, 422),
        ("/v1/rollouts", SMALL_BODY_BYTES, 413),
        ("/v1/pause", 2**23, 413),
        ("/v1/sessions", 2**23, 413),
    ],
)
@pytest.mark.parametrize("is_announced", [True, False])
async def test_only_tasks_rollouts_and_weights_may_take_megabytes(path, most, status, is_announced):
    app = create_app(load_settings(max_body_bytes=most))
    app.state.service = None  # which the body does not reach
    body = json.dumps({"unknown": "x" * SMALL_BODY_BYTES}).encode()

    async def in_pieces() -> AsyncIterator[bytes]:
        yield body

    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        answer = await http.post(path, content=body if is_announced else in_pieces(), headers=headers)
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("body", "errors"),
    [
        ({"tasks": [1] * 1_000}, 1),
        ({"tasks": [{"environment": "calc", "instance": 1}] * 1_000}, 1),
        ({"tasks": []} | dict.fromkeys(map("f{}".format, range(1_000)), 1), MAX_ERRORS),
    ],
)
async def test_a_body_of_errors_is_refused_with_few_of_them(body, errors):
    app = create_app(load_settings())
    app.state.service = None  # which the body does not reach
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        refused = await http.post("/v1/runs/a/tasks", json=body)
        assert (refused.status_code, len(refused.json()["errors"])) == (422, errors)


@pytest.mark.parametrize("version", [0, "x"])
async def test_a_large_body_is_validated_in_a_thread(monkeypatch, version):
    app, threads, validate = create_app(load_settings()), set[threading.Thread](), ModelField.validate

    def noted(self: ModelField, value: object, *given: object, **options: object) -> object:
        threads.update([threading.current_thread()] if isinstance(value, dict) else [])
        return validate(self, value, *given, **options)

    monkeypatch.setattr(ModelField, "validate", noted)
    app.state.service = None  # which the body does not reach
    tasks = [{"environment": "calc", "instance": {"n": n}} for n in range(2_000)]
    body = {"source": {"kind": "inline", "tasks": tasks}, "batch_size": 1, "version": version}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answer = await http.post("/v1/runs", json=body)
    paths = [error["path"] for error in answer.json()["errors"]]
    assert (answer.status_code, paths) == ((500, []) if version == 0 else (422, ["body.version"]))
    assert threading.main_thread() not in threads


async def test_a_query_of_unknown_parameters_is_refused_with_few_of_them():
    app = create_app(load_settings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        refused = await http.get("/v1/runs", params=dict.fromkeys(map("f{}".format, range(1_000)), 1))
        assert (refused.status_code, len(refused.json()["errors"])) == (422, MAX_ERRORS)


PIECES = [bytes([number]) * 10 for number in range(12)]
SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}
MOST_UNSENT = MAX_BUFFERED_CHUNKS + 2
"""The most chunks made and not yet sent: those in the buffer, one being made, and one being sent."""


class Made:
    """Makes chunks and counts them."""

    def __init__(self) -> None:
        self.count = 0

    async def make(self, send: Callable[[memoryview], Awaitable[None]]) -> None:
        for piece in PIECES:
            self.count += 1
            await send(memoryview(piece))


def response_of(made: Made) -> BufferedResponse:
    return BufferedResponse(made.make, {"Content-Length": str(sum(map(len, PIECES)))}, media_type="a/b")


async def test_pieces_are_made_while_one_is_sent_and_no_more_than_wait():
    made = Made()
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        if message.get("body"):
            sent.append(bytes(message["body"]))
            await until(lambda: made.count >= min(len(sent) + MAX_BUFFERED_CHUNKS, len(PIECES)))
            assert made.count <= len(sent) + MOST_UNSENT

    with anyio.fail_after(30):
        await response_of(made)(SCOPE, anyio.sleep_forever, send)
    assert sent == PIECES


async def test_nothing_is_produced_once_the_client_has_gone():
    made = Made()
    stuck = anyio.Event()

    async def receive() -> Message:
        await stuck.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message.get("body"):
            stuck.set()
            await anyio.sleep_forever()

    with anyio.fail_after(30):
        await response_of(made)(SCOPE, receive, send)
    assert made.count <= 1 + MOST_UNSENT


FIRST, SECOND = "first-key-of-enough-characters", "second-key-of-enough-characters"


@pytest.fixture
def http() -> httpx.AsyncClient:
    app = create_app(load_settings(keys=[FIRST, SECOND]))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service")


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer wrong", f"Basic {FIRST}", FIRST, f"Bearer {FIRST} x", "Bearer \xe9"]
)
async def test_without_a_right_key(http, value):
    async with http:
        headers = {"authorization": value.encode("latin-1")} if value is not None else {}
        response = await http.get("/nowhere", headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["code"] == "unauthorized"
        assert FIRST not in response.text


@pytest.mark.parametrize("value", [f"Bearer {FIRST}", f"bearer {SECOND}"])
async def test_with_a_right_key(http, value):
    async with http:
        response = await http.get("/nowhere", headers={"authorization": value})
        assert response.status_code == 404


@pytest.mark.parametrize("path", ["/s/{key}/v1/messages", "/v1/s/{key}/chat/completions", "/s/{key}"])
async def test_no_line_of_the_log_has_a_key_that_a_client_put_into_the_path(http, path, caplog):
    with caplog.at_level(logging.DEBUG), capture_logs() as lines:
        async with http:
            await http.post(path.format(key="rk-secret"), json={})
    assert [line["path"] for line in lines if line["event"] == "request"] == [path.format(key="***")]
    assert "rk-secret" not in f"{lines}"

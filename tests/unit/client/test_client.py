"""The client copes with every failure that a network or a restart can cause."""

import pickle
from contextlib import aclosing
from datetime import UTC, datetime

import anyio
import httpx
import orjson
import pytest

from api_schemas.errors import Problem
from api_schemas.events import Event
from api_schemas.external import RolloutAccess
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from rollout_client import _connection, runs
from rollout_client.client import (
    AddressError,
    ConflictError,
    InvalidRequestError,
    KeyFormatError,
    NotFoundError,
    ProblemError,
    ProtocolError,
    RolloutClient,
    UnauthorizedError,
    UnavailableError,
    UnreachableError,
)
from tests.support import samples

NOW = datetime(2026, 1, 1, tzinfo=UTC)
URL = "http://service.test"
SHUTTING_DOWN = {"title": "No", "status": 503, "detail": "it ends", "code": "shutting_down"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(_connection, "FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(_connection, "LAST_BACKOFF_SECONDS", 0.005)


def request(rollout_id: str | None = "r-1") -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, task=Task(environment="calc", instance={"question": "1+1"}))


def rollout(rollout_id: str, state: RolloutState = RolloutState.COMPLETED) -> Rollout:
    return samples.rollout(rollout_id, state, reward=1.0 if state is RolloutState.COMPLETED else None)


def problem(status: int, code: str = "some_code", *, retryable: bool = True) -> httpx.Response:
    body = Problem(title="No", status=status, detail=f"because of {code}", code=code, retryable=retryable)
    return httpx.Response(status, content=body.model_dump_json())


def answering(*answers) -> tuple[RolloutClient, list[httpx.Request]]:
    """Return a client that gets these answers in turn (an exception is raised), and a list of its requests."""
    left, seen = list(answers), []

    def handle(http_request: httpx.Request) -> httpx.Response:
        seen.append(http_request)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return RolloutClient(URL, "secret", transport=httpx.MockTransport(handle), patience_seconds=0.5), seen


def ok(model, status=200) -> httpx.Response:
    return httpx.Response(status, content=model.model_dump_json())


async def test_submit_sends_the_key_and_chooses_an_id_once():
    client, seen = answering(httpx.ConnectError("down"), problem(503), ok(rollout("x"), 202))
    async with client:
        await client.submit(request(None))
    ids = {orjson.loads(sent.content)["rollout_id"] for sent in seen}
    assert len(seen) == 3
    assert len(ids) == 1
    assert {sent.headers["authorization"] for sent in seen} == {"Bearer secret"}


async def test_submit_that_waits_says_for_how_long():
    client, seen = answering(ok(rollout("r-1")))
    async with client:
        assert (await client.submit(request(), wait_seconds=2.5)).reward == 1.0
    assert seen[0].url.params["wait"] == "2.5"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequestError),
        (401, UnauthorizedError),
        (404, NotFoundError),
        (409, ConflictError),
        (413, InvalidRequestError),
        (422, InvalidRequestError),
        (500, ProblemError),
        (502, ProblemError),  # of an engine
        (503, ProblemError),  # of wrong settings
    ],
)
async def test_a_refusal_is_typed_by_its_status_and_not_repeated(status, kind):
    client, seen = answering(problem(status, retryable=False))
    async with client:
        with pytest.raises(kind, match="because of some_code") as caught:
            await client.get("r-1")
    assert type(caught.value) is kind
    assert caught.value.problem.code == "some_code"
    assert len(seen) == 1
    passed_on = pickle.loads(pickle.dumps(caught.value))  # as between a trainer's processes
    assert (type(passed_on), str(passed_on), passed_on.problem) == (kind, str(caught.value), caught.value.problem)


async def test_patience_ends():
    client = RolloutClient(URL, transport=httpx.MockTransport(lambda _: problem(503)), patience_seconds=0.02)
    async with client:
        with pytest.raises(UnavailableError):
            await client.backends()

    def refuse(_):
        raise httpx.ConnectError("nobody listens")

    client = RolloutClient(URL, transport=httpx.MockTransport(refuse), patience_seconds=0.0)
    async with client:
        with pytest.raises(UnreachableError, match=r"service\.test: nobody listens"):
            await client.backends()


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "localhost:8080", "ftp://host", "http://", "", "http://[::1"])
def test_a_url_at_which_no_server_can_be_is_refused_at_once(url):
    with pytest.raises(AddressError, match="is not"):
        RolloutClient(url)


@pytest.mark.parametrize("key", ["a-se\ncret", "a-se\rcret", "a secret", "a-sécret", "a-s\udcffcret"])
def test_a_key_that_cannot_be_sent_is_refused_at_once_and_not_shown(key):
    with pytest.raises(KeyFormatError) as caught:
        RolloutClient(URL, key)
    assert key.strip() not in str(caught.value)


async def test_calls_that_are_repeated_for_long_say_so_once(monkeypatch, caplog):
    monkeypatch.setattr(_connection, "TELL_SECONDS", 0.05)
    client = RolloutClient(URL, transport=httpx.MockTransport(lambda _: problem(503)), patience_seconds=0.4)

    async def call() -> None:
        with pytest.raises(UnavailableError):
            await client.get("r")

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(call)
    with pytest.raises(UnavailableError) as refused:
        await client.get("r")
    [told] = caplog.messages
    assert told.startswith(f"{URL}: {refused.value}; trying again")


async def test_patience_begins_with_the_failure_and_not_with_the_call():
    answers = iter([httpx.ReadError("cut off"), ok(rollout("r-1"))])

    async def handle(_):
        await anyio.sleep(0.1)  # a long poll that outlasts the patience
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    client = RolloutClient(URL, transport=httpx.MockTransport(handle), patience_seconds=0.05)
    async with client:
        assert (await client.submit(request(), wait_seconds=1.0)).state is RolloutState.COMPLETED


async def test_a_request_that_came_too_late_or_to_a_proxy_without_a_server_is_sent_again():
    bad_gateway = httpx.Response(502, html="<p>bad gateway</p>")
    client, seen = answering(problem(408), httpx.Response(408), bad_gateway, ok(rollout("r-1")))
    async with client:
        await client.submit(request())
    assert len(seen) == 4


async def test_a_key_from_a_file_may_end_in_a_line_break():
    client = RolloutClient(URL, "secret\n")
    assert client._connection.http.headers["authorization"] == "Bearer secret"
    await client.aclose()


async def test_half_of_a_surrogate_pair_is_refused_as_the_service_would():
    client, seen = answering(ok(rollout("r-2")))
    cut_off = RolloutRequest(task=Task(environment="calc", instance={"question": "1+1 \ud83d"}))
    refused: list[str] = []
    async with client:
        both = client.run_all([cut_off, request("r-2")], refused=lambda _, error: refused.append(error.problem.detail))
        assert [each.rollout_id async for each in both] == ["r-2"]
    assert "1+1 \\ud83d" in refused[0]
    assert len(seen) == 1


async def test_a_program_that_fails_at_a_files_name_reports_its_failure():
    access = RolloutAccess(url=URL, key="k", model="m", attempt=1)
    begun = rollout("r-1", RolloutState.ROLLOUT).model_copy(update={"access": access})
    client, seen = answering(ok(begun), ok(rollout("r-1")))
    async with client:
        with pytest.raises(FileNotFoundError):
            async with client.external_rollout(request()):
                raise FileNotFoundError("\udcff.txt")
    assert orjson.loads(seen[1].content)["error"] == "FileNotFoundError: ?.txt"


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_program_that_stops_waiting_leaves_no_rollout_without_a_program(method):
    seen: list[tuple[str, str]] = []

    async def handle(http_request: httpx.Request) -> httpx.Response:
        seen.append((http_request.method, http_request.url.path))
        if http_request.method == method:
            scope.cancel()
            await anyio.sleep_forever()
        return (
            ok(rollout("r-1", RolloutState.QUEUED)) if http_request.method == "POST" else httpx.Response(202, json={})
        )

    async with RolloutClient(URL, transport=httpx.MockTransport(handle)) as client:
        with anyio.CancelScope() as scope:
            async with client.external_rollout(request()):
                raise AssertionError("it may not begin")
    assert seen[-2:] == [(method, seen[-2][1]), ("DELETE", "/v1/rollouts/r-1")]


async def test_a_program_that_is_refused_cancels_no_rollout_of_another():
    client, seen = answering(problem(409))
    async with client:
        with pytest.raises(ConflictError):
            async with client.external_rollout(request()):
                raise AssertionError("it may not begin")
    assert len(seen) == 1


async def test_an_answer_of_another_program_is_a_protocol_error():
    client, seen = answering(httpx.Response(200, html="<p>hello</p>"), httpx.Response(500, text="a defect"))
    async with client:
        with pytest.raises(ProtocolError):
            await client.backends()
        with pytest.raises(ProtocolError, match="500: a defect"):
            await client.backends()
    assert len(seen) == 2


@pytest.mark.slow
async def test_a_server_that_shuts_down_is_left_alone_for_as_long_as_it_asks():
    refusal = problem(503, "shutting_down")
    refusal.headers["retry-after"] = "1"
    client, seen = answering(refusal, httpx.Response(503, headers={"retry-after": "soon"}), ok(rollout("r-1")))
    client.patience_seconds = 10.0
    began = anyio.current_time()
    async with client:
        await client.get("r-1")
    assert anyio.current_time() - began >= 1.0
    assert len(seen) == 3


READY = {"ready": True, "reasons": []}
UNREADY = {"ready": False, "reasons": ["no backend is in service"]}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(200, json=READY), []),
        (httpx.Response(503, json=UNREADY), ["no backend is in service"]),
        (problem(503, "shutting_down"), ["because of shutting_down"]),
        (httpx.Response(502, text="bad gateway"), [f"{URL}/ready answered 502: bad gateway"]),
    ],
)
async def test_readiness_is_reported_whoever_answers(answer, said):
    client, seen = answering(answer)
    async with client:
        readiness = await client.readiness()
    assert (readiness.ready, readiness.reasons, len(seen)) == (not said, said, 1)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (problem(401), UnauthorizedError),
        (problem(500), ProblemError),
        (httpx.Response(200, text="hello"), ProtocolError),
        (httpx.Response(404, text="no such page"), ProtocolError),
        (httpx.ConnectError("down"), UnreachableError),
    ],
)
async def test_an_answer_without_readiness_is_an_error(answer, kind):
    client, seen = answering(answer)
    async with client:
        with pytest.raises(kind):
            await client.readiness()
    assert len(seen) == 1


async def test_wait_asks_until_the_end():
    client, seen = answering(ok(rollout("r-1", RolloutState.ROLLOUT)), ok(rollout("r-1")))
    async with client:
        assert (await client.wait("r-1")).state is RolloutState.COMPLETED
    assert all(sent.url.params["trajectory"] == "true" for sent in seen)


async def test_wait_has_a_time_limit():
    async def hang(_):
        await anyio.sleep(60)

    client = RolloutClient(URL, transport=httpx.MockTransport(hang))
    async with client:
        with pytest.raises(TimeoutError):
            await client.wait("r-1", timeout_seconds=0.01)


async def test_cancel_tells_known_from_unknown():
    client, _ = answering(
        httpx.Response(202, json={"rollout_id": "r-1", "was": "rollout"}),
        httpx.Response(202, json={"rollout_id": "r-2", "was": None}),
    )
    async with client:
        assert await client.cancel("r-1") is RolloutState.ROLLOUT
        assert await client.cancel("r-2") is None


async def test_removing_a_backend_takes_an_empty_answer():
    client, seen = answering(httpx.Response(204))
    async with client:
        await client.remove_backend("b-1")
    assert (seen[0].method, seen[0].url.path) == ("DELETE", "/v1/backends/b-1")


class Flaky:
    """A server that ends a rollout at its second long poll, and breaks off every fifth call."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.at_work = 0
        self.most_at_work = 0
        self.calls = 0

    async def __call__(self, http_request: httpx.Request) -> httpx.Response:
        self.calls += 1
        if self.calls % 5 == 0:
            raise httpx.ReadError("the server died")
        rollout_id = orjson.loads(http_request.content)["rollout_id"]
        if rollout_id.startswith("bad"):
            return problem(422, "invalid_field")
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        await anyio.sleep(0.001)
        self.at_work -= 1
        self.asked[rollout_id] = self.asked.get(rollout_id, 0) + 1
        ended = self.asked[rollout_id] == 2
        return ok(rollout(rollout_id, RolloutState.COMPLETED if ended else RolloutState.QUEUED))


async def test_run_all_gives_each_exactly_once():
    server = Flaky()
    requests = [request(f"r-{number}") for number in range(50)]
    async with RolloutClient(URL, transport=httpx.MockTransport(server)) as client:
        found = [result.rollout_id async for result in client.run_all(requests, concurrency=8)]
    assert sorted(found) == sorted(str(item.rollout_id) for item in requests)
    assert 1 < server.most_at_work <= 8


async def test_run_all_yields_refused_requests_and_continues():
    refused = []
    async with RolloutClient(URL, transport=httpx.MockTransport(Flaky())) as client:
        batch = client.run_all(
            [request("r-1"), request("bad-1"), request("r-2")],
            refused=lambda item, error: refused.append((item.rollout_id, error.problem.code)),
        )
        found = {result.rollout_id async for result in batch}
    assert found == {"r-1", "r-2"}
    assert refused == [("bad-1", "invalid_field")]


async def test_run_all_raises_errors_it_cannot_yield():
    async with RolloutClient(URL, transport=httpx.MockTransport(Flaky())) as client:
        with pytest.raises(InvalidRequestError):
            [result async for result in client.run_all([request("bad-1")])]


async def test_run_all_raises_an_error_of_the_requests_themselves():
    def broken():
        yield request("r-1")
        raise OSError("the disk is gone")

    async with RolloutClient(URL, transport=httpx.MockTransport(Flaky())) as client:
        with pytest.raises(OSError, match="the disk is gone"):
            [result async for result in client.run_all(broken(), concurrency=1)]


async def test_run_all_may_be_left_early():
    server = Flaky()
    async with RolloutClient(URL, transport=httpx.MockTransport(server)) as client:
        async with aclosing(client.run_all((request(f"r-{n}") for n in range(1_000)), concurrency=4)) as batch:
            async for _ in batch:
                break
        await anyio.wait_all_tasks_blocked()
        calls = server.calls
        await anyio.sleep(0.01)
        assert server.calls == calls
    assert calls < 100


async def test_run_all_needs_an_open_client():
    with pytest.raises(RuntimeError, match="async with"):
        [result async for result in RolloutClient(URL).run_all([request()])]


async def test_run_all_does_not_end_as_if_it_were_complete():
    client = RolloutClient(URL, transport=httpx.MockTransport(lambda _: anyio.sleep_forever()))

    async def read() -> None:
        with pytest.raises(RuntimeError, match="closed before"):
            await anext(client.run_all([request()]))

    async with anyio.create_task_group() as tasks, client:
        with pytest.raises(ValueError, match="concurrency"):
            client.run_all([request()], concurrency=0)
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()


async def test_a_lease_is_renewed_after_a_renewal_that_failed():
    class Leased:
        settled, renewals = False, 0

        async def renew(self, seconds: float) -> None:
            del seconds
            self.renewals += 1
            if self.renewals < 3:
                raise (UnreachableError("down"), UnavailableError(Problem(**SHUTTING_DOWN)))[self.renewals - 1]
            self.settled = True

    leased = Leased()
    with anyio.fail_after(10):
        await runs._renew_until_settled(leased, 0.003, anyio.CancelScope())
    assert leased.settled


async def test_an_error_in_the_body_is_not_wrapped():
    with pytest.raises(ValueError, match="mine"):
        async with RolloutClient(URL, transport=httpx.MockTransport(Flaky())):
            raise ValueError("mine")


def event(event_id: int) -> bytes:
    item = Event(event_id=event_id, time=NOW, kind="rollout.state", subject="r-1", data={"state": "queued"})
    return b"id: %d\nevent: rollout.state\ndata: %s\n\n" % (event_id, item.model_dump_json().encode())


class Cut(httpx.AsyncByteStream):
    """An event stream that breaks off."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def __aiter__(self):
        yield self.data
        raise httpx.ReadError("cut")


async def test_events_resume_after_the_last_one_seen():
    client, seen = answering(
        httpx.Response(200, stream=Cut(event(4) + event(5) + event(6)[:10])),
        httpx.ConnectError("restarting"),
        httpx.Response(200, content=event(6) + event(7)),
    )
    found = []
    async with client, aclosing(client.events(after=3)) as events:
        async for item in events:
            found.append(item.event_id)
            if item.event_id == 7:
                break
    assert found == [4, 5, 6, 7]
    assert [sent.headers.get("last-event-id") for sent in seen] == ["3", "5", "5"]


async def test_chosen_events_end_with_the_newest_even_if_the_connection_was_lost():
    client, seen = answering(
        httpx.Response(200, stream=Cut(event(4) + event(6)[:10])),
        httpx.Response(200, content=event(6) + b"id: 9\n\n"),
    )
    chosen = {"kinds": ["weights.updated", "run."], "subjects": ["policy"]}
    async with client, aclosing(client.events(after=3, follow=False, **chosen)) as events:
        assert [item.event_id async for item in events] == [4, 6]
    query = "kind=weights.updated&kind=run.&subject=policy&follow=false"
    assert [sent.url.query.decode() for sent in seen] == [query, query]
    assert [sent.headers.get("last-event-id") for sent in seen] == ["3", "4"]


async def test_events_resume_where_the_stream_began_before_the_first_one():
    client, seen = answering(
        httpx.Response(200, stream=Cut(b"id: 41\n\n")),
        httpx.Response(200, stream=Cut(b"id: 41\n\n: ping\n\n" + event(42)[:10])),
        httpx.Response(200, content=b"id: 41\n\n" + event(42)),
    )
    async with client, aclosing(client.events()) as events:
        assert (await anext(events)).event_id == 42
    assert [sent.headers.get("last-event-id") for sent in seen] == [None, "41", "41"]


async def test_events_resume_where_the_stream_has_come_to_without_events():
    client, seen = answering(
        httpx.Response(200, stream=Cut(event(4) + b"id: 9\n\n")),
        httpx.Response(200, stream=Cut(b"id: 9\n\n" + event(10) + b"id: 7\n\n")),  # the store has lost events
        httpx.Response(200, content=b"id: 7\n\n" + event(8)),
    )
    async with client, aclosing(client.events(after=3, subjects=["r-1"])) as events:
        assert [(await anext(events)).event_id for _ in range(3)] == [4, 10, 8]
    assert [sent.headers.get("last-event-id") for sent in seen] == ["3", "9", "7"]


async def test_an_export_that_fails_leaves_no_file(tmp_path):
    client, _ = answering(httpx.Response(200, stream=Cut(b"line\n")))
    client.patience_seconds = 0
    async with client:
        with pytest.raises(UnreachableError):
            await client.open_run("a").export(tmp_path / "a.jsonl")
    assert list(tmp_path.iterdir()) == []


class Quiet(Cut):
    """An event stream with long pauses that breaks off."""

    async def __aiter__(self):
        for piece in self.data.splitlines(keepends=True):
            await anyio.sleep(0.06)
            yield piece
        await anyio.sleep(0.06)
        raise httpx.ReadError("cut")


async def test_a_stream_that_breaks_off_without_events_is_resumed():
    client, seen = answering(
        httpx.Response(200, stream=Quiet(b": ping\n: ping\n")),
        httpx.Response(200, stream=Quiet(b": ping\n: ping\n")),
        httpx.Response(200, content=event(4)),
    )
    client.patience_seconds = 0.1
    async with client, aclosing(client.events(after=3)) as events:
        assert (await anext(events)).event_id == 4
    assert len(seen) == 3


async def test_pages_are_followed_to_the_last():
    pages = [
        httpx.Response(200, json={"rollouts": [orjson.loads(rollout("r-1").model_dump_json())], "next_cursor": "1"}),
        httpx.Response(200, json={"rollouts": [orjson.loads(rollout("r-2").model_dump_json())]}),
    ]
    client, seen = answering(*pages)
    async with client:
        found = [item.rollout_id async for item in client.rollouts(state=RolloutState.COMPLETED)]
    assert found == ["r-1", "r-2"]
    assert [sent.url.params.get("cursor") for sent in seen] == [None, "1"]
    assert seen[0].url.params["state"] == "completed"

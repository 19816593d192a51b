"""The client's calls for live sessions: ids of any text arrive whole, and a lost answer costs no key."""

import json
from datetime import UTC, datetime
from urllib.parse import unquote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.sessions import (
    RESERVED_IDS,
    Canary,
    DeletedSessions,
    FeedbackAnswer,
    LiveSession,
    OpenedSession,
    SessionPage,
    SessionRequest,
    SessionState,
)
from rollout_client import _connection
from rollout_client.client import GoneError, NotFoundError, RolloutClient
from rollout_client.sync import SyncRolloutClient

NOW = datetime(2026, 1, 1, tzinfo=UTC)
URL = "http://service.test"


def session(session_id: str, state: SessionState = SessionState.OPEN) -> LiveSession:
    return LiveSession(
        session_id=session_id,
        state=state,
        pool="policy",
        user="0" * 16,
        tenant="default",
        train=False,
        opened_at=NOW,
        used_at=NOW,
    )


def opened(session_id: str, key: str | None) -> OpenedSession:
    return OpenedSession(session=session(session_id), url=f"{URL}/v1/sessions/{session_id}", key=key)


class Service:
    """Sessions by id, as the service keeps them; the answers to the first `lost` openings get lost."""

    def __init__(self, lost: int = 0) -> None:
        self.lost = lost
        self.open: dict[str, bool] = {}
        self.seen: list[httpx.Request] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        if request.method == "POST" and request.url.path == "/v1/sessions":
            return self._open(json.loads(request.content)["session_id"])
        if request.url.path.endswith("/end"):
            name = request.url.path.split("/")[3]
            self.open[name] = False
            return _ok(session(name, SessionState.CLOSED))
        raise AssertionError(request)

    def _open(self, name: str) -> httpx.Response:
        known = name in self.open
        self.open[name] = True
        if self.lost:
            self.lost -= 1
            raise httpx.ReadError("the answer is lost")
        return _ok(opened(name, None if known else f"key-of-{name}"))


def _ok(model) -> httpx.Response:
    return httpx.Response(200, content=model.model_dump_json())


def client_of(handle) -> RolloutClient:
    return RolloutClient(URL, "secret", transport=httpx.MockTransport(handle), patience_seconds=5)


@pytest.mark.parametrize("lost", [0, 1, 3])
async def test_a_lost_answer_costs_no_key_and_leaves_no_open_session(lost, monkeypatch):
    monkeypatch.setattr(_connection, "FIRST_BACKOFF_SECONDS", 0.001)
    service = Service(lost)
    async with client_of(service.answer) as client:
        found = await client.open_session(SessionRequest(user="alice"))
    assert found.key == f"key-of-{found.session.session_id}"
    assert [name for name, is_open in service.open.items() if is_open] == [found.session.session_id]


async def test_a_session_that_the_caller_named_is_not_replaced():
    service = Service()
    async with client_of(service.answer) as client:
        first = await client.open_session(SessionRequest(session_id="mine"))
        again = await client.open_session(SessionRequest(session_id="mine"))
    assert (first.key, again.key) == ("key-of-mine", None)
    assert service.open == {"mine": True}


@pytest.mark.parametrize("session_id", sorted(RESERVED_IDS))
def test_an_id_that_cannot_stand_in_a_path_is_refused(session_id):
    with pytest.raises(ValueError, match="choose another id"):
        SessionRequest(session_id=session_id)


def test_ids_of_any_text_arrive_whole():
    seen: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path.decode())
        return _ok(session("s"))

    with SyncRolloutClient(URL, transport=httpx.MockTransport(handle), patience_seconds=0) as client:

        @given(st.text(min_size=1, max_size=40).filter(lambda text: text not in RESERVED_IDS))
        def check(session_id: str) -> None:
            client.session(session_id)
            prefix, found = seen.pop().rsplit("/", 1)
            assert (prefix, unquote(found)) == ("/v1/sessions", session_id)

        check()


async def test_sessions_are_read_page_by_page():
    pages = [
        SessionPage(sessions=[session("c"), session("b")], next_cursor="1"),
        SessionPage(sessions=[session("a")]),
    ]
    seen = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(dict(request.url.params))
        return _ok(pages.pop(0))

    async with client_of(handle) as client:
        assert [one.session_id async for one in client.sessions()] == ["c", "b", "a"]
    assert seen == [{"limit": "100"}, {"limit": "100", "cursor": "1"}]


async def test_feedback_and_deletion_name_only_what_was_given():
    seen = []

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        seen.append((request.method, request.url.path, dict(request.url.params), body))
        if request.method == "DELETE":
            return _ok(DeletedSessions(sessions=1, turns=2, undelivered=0))
        return _ok(FeedbackAnswer(turn=4, value=-1.0))

    async with client_of(handle) as client:
        assert (await client.feedback("s", -1.0)).turn == 4
        assert (await client.feedback("s", 0.5, turn=0, text="shorter")).value == -1.0
        assert (await client.delete_session("s")).turns == 2
        assert (await client.delete_sessions(user="a b")).sessions == 1
        assert (await client.delete_sessions(user="a", tenant="t")).sessions == 1
    assert seen == [
        ("POST", "/v1/sessions/s/feedback", {}, {"value": -1.0}),
        ("POST", "/v1/sessions/s/feedback", {}, {"value": 0.5, "turn": 0, "text": "shorter"}),
        ("DELETE", "/v1/sessions/s", {}, None),
        ("DELETE", "/v1/sessions", {"user": "a b"}, None),
        ("DELETE", "/v1/sessions", {"user": "a", "tenant": "t"}, None),
    ]


async def test_a_canary_is_set_read_and_removed():
    kept: list[dict] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            kept.append(json.loads(request.content))
            return httpx.Response(200, json=kept[-1])
        if request.method == "DELETE":
            kept.remove(next(one for one in kept if one["pool"] == request.url.params["pool"]))
            return httpx.Response(204)
        return httpx.Response(200, json=kept)

    canary = Canary(pool="policy", candidate="policy-next", share=0.1)
    async with client_of(handle) as client:
        assert await client.set_canary(canary) == canary
        assert await client.canaries() == [canary]
        await client.remove_canary()
        assert await client.canaries() == []


@pytest.mark.parametrize(("status", "error"), [(404, NotFoundError), (410, GoneError)])
async def test_a_missing_and_an_ended_session_are_errors_of_their_own(status, error):
    body = {"title": "No", "status": status, "detail": "there is none", "code": "x"}

    async with client_of(lambda _: httpx.Response(status, json=body)) as client:
        with pytest.raises(error):
            await client.session("s")

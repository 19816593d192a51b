"""The blocking client has every method of the asynchronous one, and its calls and loops end as they should."""

import inspect
import multiprocessing
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any

import anyio
import httpx
import pytest
from anyio.from_thread import BlockingPortal

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Task
from rollout_client.calls.engines import EngineCalls
from rollout_client.calls.lists import ListCalls, ViewCalls
from rollout_client.calls.rollouts import RolloutCalls
from rollout_client.calls.service import ServiceCalls
from rollout_client.calls.sessions import SessionCalls
from rollout_client.client import ClientRun, LeasedBatch, NotFoundError, RolloutClient
from rollout_client.external import ExternalRollout
from rollout_client.sync import SyncBatch, SyncExternalRollout, SyncRolloutClient, SyncRun

PAIRS = [
    (RolloutClient, SyncRolloutClient),
    *(
        (calls, SyncRolloutClient)
        for calls in (RolloutCalls, EngineCalls, ServiceCalls, SessionCalls, ListCalls, ViewCalls)
    ),
    (ClientRun, SyncRun),
    (LeasedBatch, SyncBatch),
    (ExternalRollout, SyncExternalRollout),
]
ASYNCHRONOUS_ONLY = {"aclose"}
"""Methods for use without `async with`. The blocking client always needs `with`, which runs its thread."""


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS)
def test_nothing_is_missing(asynchronous, blocking):
    missing = set(public(asynchronous)) - ASYNCHRONOUS_ONLY - set(public(blocking))
    assert not missing - vars(SyncRolloutClient("http://server")).keys()


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS)
def test_signatures_agree(asynchronous, blocking):
    for name, method in public(asynchronous).items():
        if inspect.isfunction(method) and name not in ASYNCHRONOUS_ONLY:
            theirs = getattr(blocking, name)
            assert inspect.signature(theirs).parameters == inspect.signature(method).parameters, name
            assert theirs.__doc__, name


def test_both_clients_are_made_alike():
    made = [inspect.signature(kind.__init__).parameters for kind in (RolloutClient, SyncRolloutClient)]
    assert made[0] == made[1]
    assert {"content", "batch", "arrays", "settled"} <= set(public(SyncBatch))
    assert "run_id" in public(SyncRun)


def answer(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/v1/events":
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Events())
    if request.url.path == "/v1/rollouts" and request.method == "GET":
        return httpx.Response(200, json={"rollouts": [rollout("a"), rollout("b")]})
    if request.method == "POST":
        return httpx.Response(200, json=rollout(request.url.path))
    problem = {"title": "Not found", "status": 404, "detail": "there is none", "code": "not_found"}
    return httpx.Response(404, json=problem)


def rollout(rollout_id: str) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id.strip("/").replace("/", "-"),
        "state": "completed",
        "task": {"environment": "calc"},
        "pool": "policy",
        "created_at": "2026-01-01T00:00:00Z",
    }


class Events(httpx.AsyncByteStream):
    """A stream of two events that then stays silent."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number in (1, 2):
            yield (
                f'id: {number}\ndata: {{"event_id": {number}, "time": "2026-01-01T00:00:00Z", '
                f'"kind": "x", "subject": "y"}}\n\n'
            ).encode()
        await anyio.sleep_forever()


def client() -> SyncRolloutClient:
    return SyncRolloutClient("http://service", transport=httpx.MockTransport(answer), patience_seconds=0)


def test_calls_and_loops_give_what_the_asynchronous_ones_give():
    with client() as blocking:
        assert [each.rollout_id for each in blocking.rollouts()] == ["a", "b"]
        with pytest.raises(NotFoundError):
            blocking.get("nobody")


def test_a_loop_that_is_left_early_leaves_no_thread():
    before = threading.active_count()
    with client() as blocking:
        for event in blocking.events(after=0):
            if event.event_id == 2:
                break
        endless = blocking.events(after=0)
        assert next(endless).event_id == 1
    assert threading.active_count() == before
    endless.close()  # the client is closed, so the loop has already ended


class Interrupted(AbstractContextManager[None]):
    """A wait that Ctrl-C ends."""

    def __enter__(self) -> None:
        raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        raise AssertionError("it did not begin")


def test_a_program_that_is_interrupted_before_it_begins_cancels_its_rollout(monkeypatch):
    seen: list[tuple[str, str]] = []

    def cancelled(sent: httpx.Request) -> httpx.Response:
        seen.append((sent.method, sent.url.path))
        return httpx.Response(202, json={})

    request = RolloutRequest(rollout_id="a", task=Task(environment="calc"))
    with SyncRolloutClient("http://service", transport=httpx.MockTransport(cancelled)) as blocking:
        monkeypatch.setattr(BlockingPortal, "wrap_async_context_manager", lambda *_: Interrupted())
        with pytest.raises(KeyboardInterrupt), blocking.external_rollout(request):
            raise AssertionError("it may not begin")
    assert seen == [("DELETE", "/v1/rollouts/a")]


def test_a_client_that_is_not_open_says_so():
    with pytest.raises(RuntimeError, match="open the client first"):
        client().runs()


def test_patience_changes_while_the_client_is_open():
    with client() as blocking:
        blocking.patience_seconds = 7
        assert blocking._wrapped.patience_seconds == blocking.patience_seconds == 7


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_is_told_to_open_a_client_of_its_own():
    fork = multiprocessing.get_context("fork")
    told = fork.SimpleQueue()

    def call(blocking: SyncRolloutClient) -> None:
        try:
            list(blocking.rollouts())
        except RuntimeError as error:
            told.put(str(error))

    with client() as blocking:
        process = fork.Process(target=call, args=(blocking,))
        process.start()
        process.join(20)
        process.kill()
    assert not told.empty()
    assert "open another here" in told.get()

"""Large bodies are read and rendered while their clients wait, within bounds, and never for clients that have gone."""

import json
import threading
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from rollout_service.gateway.capture import PlannedTurn, TurnCapture
from rollout_service.gateway.contract import Dialect, ModelCall
from rollout_service.gateway.server.app import INLINE_BYTES
from rollout_service.gateway.sessions import session
from rollout_service.http.requests import BodiesInFlight
from rollout_service.tokens import ChatRenderer
from tests.support.gateway.asgi import COUNTS, PATHS, GatewayBench, gateway_bench

CHAT, COUNT = PATHS[Dialect.CHAT], COUNTS[Dialect.ANTHROPIC]
# Fields without effect make a body large whose prompt is short.
LARGE = {"messages": [{"role": "user", "content": "hi"}], "metadata": {"note": "x" * INLINE_BYTES}}
CONTENT = json.dumps(LARGE).encode()


class SlowCapture(TurnCapture):
    """Makes a prompt once the test lets it."""

    def __init__(self, renderer: ChatRenderer) -> None:
        super().__init__(renderer)
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.plans = 0

    def plan(self, call: ModelCall, context_length: int | None = None) -> PlannedTurn:
        self.plans += 1
        self.began.set()
        assert self.goes_on.wait(30)
        return super().plan(call, context_length)


@pytest.mark.parametrize("path", [CHAT, COUNT])
async def test_nothing_is_rendered_for_a_client_that_has_gone(renderer, path):
    async with gateway_bench(renderer) as b:
        capture = b.session._capture = SlowCapture(renderer)
        first, second = anyio.Event(), anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(b.ask_and_leave, path, CONTENT, first)
            await anyio.to_thread.run_sync(capture.began.wait)
            async with anyio.create_task_group() as waiting:
                other = CONTENT.replace(b"hi", b"ho")
                waiting.start_soon(b.ask_and_leave, path, other, second)
                await anyio.wait_all_tasks_blocked()
                second.set()  # while it waits for its turn
            first.set()  # while its prompt is made
            await anyio.wait_all_tasks_blocked()
            capture.goes_on.set()
        assert capture.plans == 1
        assert not b.engine.requests
        await until_idle(b)
        again = await b.post(path, content=CONTENT)
        assert again.status_code == 200, again.text


async def until_idle(b: GatewayBench) -> None:
    """Wait until no call is open."""
    with anyio.fail_after(10):
        while b.session.is_busy:
            await anyio.wait_all_tasks_blocked()


async def test_a_call_that_two_clients_wait_for_outlives_one_of_them(renderer, monkeypatch):
    monkeypatch.setattr(session, "RETRY_GRACE_SECONDS", 10.0)
    async with gateway_bench(renderer) as b:
        capture = b.session._capture = SlowCapture(renderer)
        left = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(b.ask_and_leave, CHAT, CONTENT, left)
            await anyio.to_thread.run_sync(capture.began.wait)

            async def repeat() -> None:
                assert (await b.post(CHAT, content=CONTENT)).status_code == 200

            tasks.start_soon(repeat)
            await anyio.wait_all_tasks_blocked()
            left.set()
            await anyio.wait_all_tasks_blocked()
            capture.goes_on.set()
        assert capture.plans == 1
        assert b.session.usage.turns == 1


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.ANTHROPIC, Dialect.GOOGLE])
async def test_bodies_beyond_what_is_read_at_once_are_told_to_come_back(renderer, dialect):
    bodies = BodiesInFlight(2 * len(CONTENT), 0, wait_seconds=0)
    kinds = {Dialect.CHAT: "rate_limit_error", Dialect.ANTHROPIC: "rate_limit_error"}
    async with gateway_bench(renderer, bodies=bodies) as b:
        capture = b.session._capture = SlowCapture(renderer)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(b.ask_and_leave, CHAT, CONTENT, anyio.Event())
            await anyio.to_thread.run_sync(capture.began.wait)
            refused = await b.post(PATHS[dialect], content=CONTENT)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert kind_of(refused.json()["error"]) in (kinds.get(dialect), "RESOURCE_EXHAUSTED")
            capture.goes_on.set()
            await until_idle(b)
            tasks.cancel_scope.cancel()
        assert (await b.post(CHAT, content=CONTENT)).status_code == 200, "its bytes are free again"


def kind_of(error: Mapping[str, Any]) -> str:
    return str(error.get("type") or error["status"])


async def test_answers_of_a_request_that_fails_midway_are_given_up(renderer):
    class FailingCapture(TurnCapture):
        plans = 0

        def plan(self, call: ModelCall, context_length: int | None = None) -> PlannedTurn:
            FailingCapture.plans += 1
            if FailingCapture.plans == 3:
                raise ValueError("broken")
            return super().plan(call, context_length)

    async with gateway_bench(renderer, retry_seconds=0) as b:
        b.session._capture = FailingCapture(renderer)
        failed = await b.post(CHAT, {"messages": LARGE["messages"], "n": 4})
        assert failed.status_code == 500
        await until_idle(b)
        assert b.session.usage.turns <= 2

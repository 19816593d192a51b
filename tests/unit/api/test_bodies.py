"""The bodies that are read at once are bounded together, and no sender keeps out the others."""

from collections.abc import AsyncIterator

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.base.errors import TooManyBytesError
from rollout_service.http.requests import BodiesInFlight, HeldBytes
from rollout_service.server.api.app import create_app
from rollout_service.server.api.routes.support.strict import MAX_CONTAINERS
from rollout_service.settings import load_settings

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


@pytest.mark.parametrize("item", ["{}", "[]"])
async def test_a_body_that_would_take_many_times_its_size_is_refused(item):
    app = create_app(load_settings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        body = f'{{"metadata": {{"x": [{",".join([item] * (MAX_CONTAINERS + 1))}]}}}}'
        headers = {"content-type": "application/json"}
        refused = await http.post("/v1/rollouts", content=body, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (413, "request_entity_too_large")

"""Served turns become batches, and are deleted for good, in a running service."""

from typing import Any

import anyio
import anyio.to_thread
import pytest

from api_schemas.runs import Batch
from rollout_service.tokens import ChatRenderer, check_invariants
from tests.support.gateway.service import END, POLICY, scripted
from tests.support.live.service import LiveService, live_service


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def store(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the settings of the store of runs and rollouts."""
    if request.param == "sqlite":
        return {}
    config = request.getfixturevalue("shared_redis").config()
    return {"store": {"url": config.url, "prefix": config.prefix}}


RUN = {
    "run_id": "live",
    "source": {"kind": "inline", "open": True},
    "group_size": 1,
    "batch_size": 1,
    "live": {"close_turns": 2},
}


async def create_run(service: LiveService, **fields: Any) -> None:
    answer = await service.http.post("/v1/runs", json=RUN | fields)
    assert answer.status_code in (200, 201), answer.text


async def lease(service: LiveService, seconds: float = 10.0) -> Batch | None:
    answer = await service.http.post("/v1/runs/live/lease", params={"timeout": seconds})
    return None if answer.status_code == 204 else Batch.model_validate_json(answer.content)


async def talk(service: LiveService, values: list[float], **fields: Any) -> str:
    """Have a conversation of which the user judges each answer, and end it; return the session's id."""
    opened = await service.open(**fields)
    name, contents = opened.session.session_id, ["the question of a person"]
    for number, value in enumerate(values):
        answer = (await service.ask(opened.key, *contents)).json()["choices"][0]["message"]["content"]
        said = {"value": value, "turn": number}
        with anyio.fail_after(10):
            while (await service.http.post(f"/v1/sessions/{name}/feedback", json=said)).status_code != 200:
                await anyio.sleep(0.01)  # the last token is still on its way
        contents += [answer, f"what the person said about answer {number}"]
    await service.http.post(f"/v1/sessions/{name}/end")
    return name


async def test_a_conversation_becomes_a_batch(tmp_path, store):
    async with scripted("Hello.", "Better?") as engine, live_service(tmp_path, [engine], **store) as service:
        await create_run(service)
        name = await talk(service, [1.0, -1.0])
        batch = await lease(service)
        rollout = batch.groups[0].samples[0].rollout
        assert (rollout.session.session_id, rollout.reward) == (name, 0.0)
        assert [(mark.turn, mark.value, mark.usable) for mark in rollout.turn_marks] == [
            (0, 1.0, True),
            (1, -1.0, True),
        ]
        check_invariants(rollout.trajectory)
        [segment] = rollout.trajectory.segments
        sampled = [token for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]
        assert sampled == ChatRenderer.load(POLICY).encode(f"Hello.{END}Better?{END}")
        shown = await service.show(name)
        assert (shown.counts.served, shown.counts.delivered, shown.counts.waiting) == (2, 2, 0)
        [part] = shown.handed_over
        assert (part.run_id, part.rollout_id, part.turns) == (batch.run_id, rollout.rollout_id, [0, 1])


async def test_nobody_submits_a_part_of_a_session(tmp_path):
    async with scripted("Hello.") as engine, live_service(tmp_path, [engine]) as service:
        await create_run(service)
        task = {"environment": "session", "instance": {"parts": [["s", 0]]}}
        for path, body in (
            ("/v1/rollouts", {"task": task}),
            ("/v1/runs", RUN | {"run_id": "b", "live": None, "source": {"kind": "inline", "tasks": [task]}}),
        ):
            assert (await service.http.post(path, json=body)).status_code == 422, path
        answer = await service.http.post("/v1/runs/live/tasks", json={"tasks": [task]})
        assert answer.status_code == 409
        assert "trains on live sessions" in answer.text
        assert (await service.http.post("/v1/runs/live/tasks", json={"tasks": [], "close": True})).is_success

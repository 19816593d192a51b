"""In a whole service, an answer gets its value from what the user said next, and serving waits for no judge."""

import time

import anyio
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.rollouts.sessions import MarkReason
from api_schemas.sessions import LiveSession
from rollout_service.base.errors import ConfigurationError, root_cause
from rollout_service.testing import ScriptedEngine
from tests.support.gateway.service import scripted
from tests.support.live.service import LiveService, live_service

NO = r"A complaint. \boxed{-1}"


async def talk(service: LiveService, says: str = "No, end with =") -> str:
    """Serve two turns of a new session, and return its id."""
    opened = await service.open()
    assert opened.key is not None
    assert (await service.ask(opened.key, "Hi")).status_code == 200
    assert (await service.ask(opened.key, "Hi", "Hello.", says)).status_code == 200
    return opened.session.session_id


async def add_judge(service: LiveService, engine: ScriptedEngine) -> None:
    spec = BackendSpec(url=HttpUrl(engine.url), pool="judge")
    assert (await service.http.post("/v1/backends", json=spec.model_dump(mode="json"))).is_success


async def judged(service: LiveService, session_id: str) -> LiveSession:
    with anyio.fail_after(20):
        while (shown := await service.show(session_id)).counts.judged + _without_value(shown) < 1:
            await anyio.sleep(0.01)
        return shown


def _without_value(session: LiveSession) -> int:
    return sum(turn.reason is not None and turn.value is None for turn in session.turns)


async def test_an_answer_gets_its_value_from_what_the_user_said_next(tmp_path):
    async with (
        scripted("Hello.", "Hello =") as policy,
        scripted(NO) as judge,
        live_service(tmp_path, [policy]) as service,
    ):
        await add_judge(service, judge)
        session_id = await talk(service)
        shown = await judged(service, session_id)
        metrics = (await service.http.get("/metrics")).text
    first, second = shown.turns
    assert (first.value, first.reason, first.source) == (-1.0, MarkReason.MAJORITY, "judge")
    assert (second.value, second.reason) == (None, None)
    assert 'rollout_live_values_total{source="judge",value="minus"} 1.0' in metrics
    assert 'rollout_judge_votes_total{outcome="valid",rubric="live-turn"}' in metrics


async def test_turns_wait_for_a_judge_through_a_restart_and_serving_does_not(tmp_path):
    async with scripted(*["Hello."] * 9) as policy, scripted(NO) as judge:
        async with live_service(tmp_path, [policy]) as service:
            session_id = await talk(service)
            assert (await service.show(session_id)).counts.judged == 0
        async with live_service(tmp_path, [policy]) as service:
            await add_judge(service, judge)
            assert (await judged(service, session_id)).turns[0].value == -1.0


async def test_a_judge_that_hangs_leaves_a_reason_and_answers_go_on(tmp_path):
    settings = {"live": {"judge": {"vote_seconds": 0.3}}}
    async with (
        scripted(*["Hello."] * 20) as policy,
        scripted(NO) as judge,
        live_service(tmp_path, [policy], **settings) as service,
    ):
        await add_judge(service, judge)
        assert (await service.http.post("/v1/pause", json={"pool": "judge"})).is_success
        started = time.monotonic()
        session_id = await talk(service)
        assert time.monotonic() - started < 5
        shown = await judged(service, session_id)
    assert (shown.turns[0].value, shown.turns[0].reason) == (None, MarkReason.TIMEOUT)


async def test_what_a_user_says_with_a_rating_becomes_a_hint_and_the_rating_stays(tmp_path):
    settings = {"live": {"judge": {"hints": True, "votes": 1}}}
    said = r"[HINT_START]End each answer with an equals sign.[HINT_END] \boxed{1}"
    async with (
        scripted("Hello.") as policy,
        scripted(said) as judge,
        live_service(tmp_path, [policy], **settings) as service,
    ):
        await add_judge(service, judge)
        opened = await service.open()
        assert opened.key is not None
        assert (await service.ask(opened.key, "Hi")).status_code == 200
        url = f"/v1/sessions/{opened.session.session_id}/feedback"
        rating = {"value": -1, "text": "it must end with ="}
        assert (await service.http.post(url, json={"turn": 0} | rating)).is_success
        with anyio.fail_after(20):
            while (turn := (await service.show(opened.session.session_id)).turns[0]).hint is None:
                await anyio.sleep(0.01)
    assert (turn.value, turn.reason) == (-1.0, MarkReason.EXPLICIT)
    assert turn.hint.text == "End each answer with an equals sign."


@pytest.mark.parametrize("judge", [{"overrides": ["tool_eror"]}, {"prompt": "missing.jinja"}])
async def test_a_judge_that_cannot_work_keeps_the_service_from_starting(tmp_path, judge):
    with pytest.raises(ExceptionGroup) as caught:
        async with live_service(tmp_path, [], live={"judge": judge}):
            pass
    error = root_cause(caught.value)
    assert isinstance(error, ConfigurationError)
    assert "did you mean tool_error" in str(error) or "cannot be read" in str(error)

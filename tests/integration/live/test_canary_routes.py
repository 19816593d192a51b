"""A canary over HTTP: new sessions go to the candidate, keep their place, and are judged by version."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.sessions import Canary, OpenedSession, SessionRequest
from rollout_client.client import InvalidRequestError, UnavailableError
from rollout_service.live import canary, sessions
from tests.support.gateway.service import scripted
from tests.support.live.child_service import Echoes, LiveService, RecordingEngine, live_service
from tests.support.live.service import live_service as in_process
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(120)

CANARY = Canary(pool="policy", candidate="next", share=1.0)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[LiveService]:
    async with live_service(tmp_path / "state") as found, RecordingEngine(Echoes()) as engine:
        await found.client.add_backend(BackendSpec(url=HttpUrl(engine.url), pool="next"))
        yield found


async def opened(service: LiveService) -> OpenedSession:
    return await service.client.open_session(SessionRequest(train=True))


async def say(session: OpenedSession, word: str) -> str:
    body = {"model": "any", "messages": [{"role": "user", "content": f"Please say {word}"}]}
    async with httpx.AsyncClient(timeout=30) as http:
        headers = {"authorization": f"Bearer {session.key}"}
        answer = await http.post(f"{session.url}/v1/chat/completions", json=body, headers=headers)
    return str(answer.json()["choices"][0]["message"]["content"])


async def test_new_sessions_try_the_candidate_and_keep_it(service):
    client = service.client
    before = await opened(service)
    assert await client.set_canary(CANARY) == CANARY
    during = await opened(service)
    assert await client.canaries() == [CANARY]
    await client.remove_canary()
    after = await opened(service)
    assert await client.canaries() == []
    assert [one.session.pool for one in (before, during, after)] == ["policy", "next", "policy"]
    await client.update_weights("scripted", 3, pool="next")
    for one, value in ((before, -1.0), (during, 1.0), (after, -0.5)):
        assert await say(one, "hello") == "You said hello."
        await client.feedback(one.session.session_id, value)
    figures = [(one.pool, one.turns, one.value_mean, one.satisfied) for one in await client.feedback_by_version()]
    assert figures == [("next", 1, 1.0, 1.0), ("policy", 2, -0.75, 0.0)]
    async with httpx.AsyncClient(base_url=client.base_url) as http:
        metrics = (await http.get("/metrics")).text
    assert 'rollout_live_satisfied_share{pool="next",version="3"} 1.0' in metrics
    assert "rollout_live_sessions 3.0" in metrics


async def test_a_canary_that_cannot_be_is_refused(service):
    service.client.patience_seconds = 0
    for candidate, error in (("policy", InvalidRequestError), ("nowhere", (InvalidRequestError, UnavailableError))):
        with pytest.raises(error) as caught:
            await service.client.set_canary(Canary(pool="policy", candidate=candidate, share=0.5))
        assert caught.value.problem.code in ("invalid_field", "no_backend")
    assert await service.client.canaries() == []


async def test_a_session_goes_on_in_the_main_pool_once_the_candidates_engines_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(canary, "ABANDONED_SECONDS", 0.0)
    monkeypatch.setattr(sessions, "_LONGEST_LOOK", 0.05)
    async with (
        scripted("Main.") as main,
        scripted("Next.") as other,
        in_process(tmp_path, [main], live={"hold_seconds": 0.2}) as service,
    ):
        added = await service.http.post("/v1/backends", json={"url": other.url, "pool": "next"})
        await service.http.put("/v1/sessions/canary", json=CANARY.model_dump())
        opened = await service.open()
        assert "Next." in (await service.ask(opened.key, "a")).text
        assert (await service.http.delete(f"/v1/backends/{added.json()['backend_id']}")).is_success

        async def main_answers() -> bool:
            return "Main." in (await service.ask(opened.key, "a", "Next.", "b")).text

        await until(main_answers, 20)
        assert (await service.show(opened.session.session_id)).pool == "policy"

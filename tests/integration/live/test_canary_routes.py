"""A canary over HTTP: new sessions go to the candidate, and keep their place for as long as it has engines."""

import pytest

from rollout_service.live import canary, sessions
from tests.support.gateway.service import scripted
from tests.support.live.service import delivered, live_service
from tests.support.waiting import until

CANARY = {"pool": "policy", "candidate": "next", "share": 1.0}


async def test_new_sessions_try_the_candidate_and_keep_it_until_its_engines_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(canary, "ABANDONED_SECONDS", 0.0)
    monkeypatch.setattr(sessions, "_LONGEST_LOOK", 0.05)
    async with (
        scripted("Main.") as main,
        scripted("Next.") as other,
        live_service(tmp_path, [main], live={"hold_seconds": 0.2}) as service,
    ):
        http = service.http
        added = await http.post("/v1/backends", json={"url": other.url, "pool": "next"})
        before = await service.open()
        assert (await http.put("/v1/sessions/canary", json=CANARY)).json() == CANARY
        during = await service.open()
        assert (await http.get("/v1/sessions/canary")).json() == [CANARY]
        assert (await http.delete("/v1/sessions/canary", params={"pool": "policy"})).is_success
        after = await service.open()
        assert [one.session.pool for one in (before, during, after)] == ["policy", "next", "policy"]
        order = {"path": "scripted", "version": 3, "pool": "next"}
        assert (await http.post("/v1/weights", json=order)).is_success
        for one, says, value in ((before, "Main.", -1.0), (during, "Next.", 1.0), (after, "Main.", -0.5)):
            assert says in (await service.ask(one.key, "a")).text
            await delivered(service, one.session.session_id, 1)
            feedback = f"/v1/sessions/{one.session.session_id}/feedback"
            assert (await http.post(feedback, json={"value": value})).is_success
        found = (await http.get("/v1/sessions/feedback")).json()
        assert [(one["pool"], one["turns"], one["value_mean"]) for one in found] == [
            ("next", 1, 1.0),
            ("policy", 2, -0.75),
        ]
        metrics = (await http.get("/metrics")).text
        assert 'rollout_live_satisfied_share{pool="next",version="3"} 1.0' in metrics
        assert "rollout_live_sessions 3.0" in metrics
        assert (await http.delete(f"/v1/backends/{added.json()['backend_id']}")).is_success

        async def main_answers() -> bool:
            return "Main." in (await service.ask(during.key, "a", "Next.", "b")).text

        await until(main_answers, 20)
        assert (await service.show(during.session.session_id)).pool == "policy"


@pytest.mark.parametrize("candidate", ["policy", "nowhere"])
async def test_a_canary_that_cannot_be_is_refused(tmp_path, candidate):
    async with scripted("Main.") as main, live_service(tmp_path, [main]) as service:
        refused = await service.http.put("/v1/sessions/canary", json=CANARY | {"candidate": candidate})
        assert refused.json()["code"] in ("invalid_field", "no_backend")
        assert (await service.http.get("/v1/sessions/canary")).json() == []

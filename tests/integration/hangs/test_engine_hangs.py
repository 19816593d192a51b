"""Engines that hang are named, with the rollouts that wait for them; engines that work are not."""

from pathlib import Path

import anyio
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.rollouts import RolloutState
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangVerdict
from rollout_service.testing import Replies
from rollout_service.testing.engine_turn import Fault
from tests.support.gateway.service import POLICY
from tests.support.hangs.service import MODEL, CountingEngine, call, engine_of, hang_service

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(150)]


async def test_a_request_that_is_never_answered_and_a_slow_one_that_is(tmp_path: Path) -> None:
    async with (
        engine_of("true") as lost,
        CountingEngine(Replies.from_texts([call("true")], POLICY), latency=28.0, **MODEL) as works,
        hang_service(tmp_path, [lost]) as service,
    ):
        await service.client.add_backend(BackendSpec(url=HttpUrl(works.url), pool="slow"))
        lost.inject(Fault.HANG, 2)
        await service.submit("works", pool="slow")
        await service.submit("lost-1")
        await service.submit("lost-2")
        found = await service.finding(lambda one: one.count == 2)
        assert (found.kind, found.verdict, found.responds) == (StepKind.ENGINE, HangVerdict.STUCK, True)
        assert found.subject in [view.backend_id for view in await service.client.backends()]
        assert sorted(found.rollouts) == ["lost-1", "lost-2"]
        assert "has done nothing" in found.message
        assert "0 running" in found.message
        assert found.stage == "rollout"
        assert any(frame.function.endswith("Dispatcher._send") and frame.ours for frame in found.stack)
        activity = await service.client.activity("works")
        assert [wait.kind for wait in activity.waits] == [StepKind.ENGINE]
        assert activity.stage == "rollout"
        assert activity.stack
        for rollout_id in ("lost-1", "lost-2"):
            await service.client.cancel(rollout_id)
        events = await service.ended(found.finding_id)
        assert [event.kind for event in events] == ["hang.began", "hang.ended"]
        assert events[0].subject == found.subject
        finished = await service.client.wait("works", timeout_seconds=60)
        assert finished.state is RolloutState.COMPLETED, finished.error
        [span] = [span for span in finished.spans if span.stage == "rollout"]
        assert span.engine_seconds > 20
        report = await service.report()
        assert report.findings == []


async def test_an_engine_that_accepts_requests_and_answers_nothing(tmp_path: Path) -> None:
    async with (
        engine_of("true", latency=0.5) as engine,
        hang_service(tmp_path, [engine]) as service,
    ):
        engine.frozen = True
        for number in range(3):
            await service.submit(f"r{number}")
        found = await service.finding(lambda one: one.kind == StepKind.ENGINE and one.count == 3)
        assert (found.verdict, found.responds) == (HangVerdict.STUCK, False)
        assert sorted(found.rollouts) == ["r0", "r1", "r2"]
        assert "no longer answers" in found.message
        assert "restart the engine" in found.hint
        [backend] = await service.client.backends()
        assert found.subject == backend.backend_id
        # Once the pool has taken the engine out of service, they wait for an engine.
        gone = await service.finding(lambda one: one.kind == StepKind.PAUSED_POOL)
        assert (gone.subject, gone.verdict, gone.responds) == ("policy", HangVerdict.STUCK, False)
        assert backend.backend_id in gone.message
        await service.ended(found.finding_id)
        engine.frozen = False
        with anyio.fail_after(60):
            for number in range(3):
                assert (await service.client.wait(f"r{number}")).state is RolloutState.COMPLETED
        await service.ended(gone.finding_id)


async def test_a_paused_pool_holds_its_rollouts(tmp_path: Path) -> None:
    async with engine_of("true") as engine, hang_service(tmp_path, [engine]) as service:
        await service.client.pause(pool="policy")
        await service.submit("r")
        found = await service.finding(lambda one: True)
        assert (found.kind, found.verdict, found.subject) == (
            StepKind.PAUSED_POOL,
            HangVerdict.HELD,
            "policy",
        )
        assert "has been paused since" in found.message
        assert "/v1/resume" in found.hint
        assert found.detail["paused_since"]
        await service.client.resume(pool="policy")
        events = await service.ended(found.finding_id)
        assert events[0].data["verdict"] == "held"
        assert (await service.client.wait("r", timeout_seconds=30)).state is RolloutState.COMPLETED

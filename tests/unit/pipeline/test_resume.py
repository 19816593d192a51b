"""An interrupted rollout continues from its last saved turn, token for token, or begins anew for a counted reason."""

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import Rollout, RolloutState, Stage, StopReason
from api_schemas.trajectories import Message
from rollout_service.engines.serving import turn_log
from rollout_service.episodes import Episode, WorkClock
from rollout_service.pipeline.settlement import keeps_turns
from rollout_service.store.contract import UnsavedTurn
from rollout_service.tokens import check_invariants
from tests.support.resumable import FOUR, Outputs, Work, bench
from tests.support.tokens.characters import CharRenderer

pytestmark = pytest.mark.slow


async def undisturbed(work: Work = FOUR) -> Rollout:
    async with bench() as b:
        await b.submit()
        return await b.finish(work)


@given(at=st.lists(st.integers(0, 3), max_size=3), compacts_at=st.none() | st.integers(1, 3))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_interruptions_change_no_token_and_sample_no_turn_twice(at, compacts_at):
    work = Outputs(FOUR.outputs, compacts_at)
    expected = await undisturbed(work)
    async with bench() as b:
        await b.submit()
        for turn in sorted(at):
            b.engine.hangs_at = None
            if compacts_at is None or turn < compacts_at:  # the engine counts the turns of a segment
                await b.interrupt(turn, work)
        rollout = await b.finish(work)
        assert rollout.trajectory == expected.trajectory
        assert rollout.trajectory is not None
        check_invariants(rollout.trajectory)
        assert (rollout.usage, rollout.reward) == (expected.usage, expected.reward)
        assert rollout.attempt == 1
        assert b.engine.sampled == len(FOUR.outputs)
        assert await b.store.saved_turns("r") == []


async def test_a_resumed_rollout_says_so():
    async with bench() as b:
        await b.submit()
        await b.interrupt(3)
        rollout = await b.finish()
        [span] = [span for span in rollout.spans if span.stage is Stage.ROLLOUT]
        assert span.turns_replayed == 3
        [event] = await b.resume_events()
        assert (event["outcome"], event["reason"], event["turns"]) == ("resumed", "", 3)
        assert 'rollout_resumes_total{outcome="resumed",reason=""} 1.0' in b.metrics
        assert "rollout_resumed_turns_total 3.0" in b.metrics


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        ("output_differs", {"work": Outputs(["other", "b", "c", "d"])}),
        ("ended_early", {"work": Outputs(["a"])}),
        ("prompt_differs", {"renderer": CharRenderer(offset=1_000)}),
        ("not_replayable", {"replayable": "never"}),
        ("disabled", {"resume": False}),
    ],
)
async def test_what_cannot_be_replayed_begins_anew_and_is_counted(reason, how):
    async with bench() as b:
        await b.submit()
        await b.interrupt(2)
        assert len(await b.store.saved_turns("r")) == 2
        work = how.get("work", FOUR)
        rollout = await b.finish(**how)
        assert (rollout.state, rollout.attempt, rollout.retries) == (RolloutState.COMPLETED, 1, [])
        assert rollout.usage.turns == len(work.outputs)
        assert b.engine.sampled == 2 + len(work.outputs), "everything is sampled again"
        assert rollout.trajectory is not None
        check_invariants(rollout.trajectory)
        assert f'rollout_resumes_total{{outcome="begun_anew",reason="{reason}"}} 1.0' in b.metrics
        [event] = await b.resume_events()
        assert (event["outcome"], event["reason"]) == ("begun_anew", reason)
        failed = [span for span in rollout.spans if span.error]
        assert len(failed) == (reason in {"output_differs", "ended_early", "prompt_differs"})


async def test_an_environment_that_is_never_replayable_saves_only_a_mark():
    async with bench() as b:
        await b.submit()
        await b.interrupt(2, replayable="never")
        assert await b.store.saved_turns("r") == [b""]
        await b.finish(replayable="never")
        assert 'reason="not_replayable"} 1.0' in b.metrics


async def test_damaged_turns_are_not_played():
    async with bench() as b:
        await b.submit()
        [lease] = await b.store.claim("gone", limit=1, lease_seconds=30)
        await b.store.save_turns("gone", [UnsavedTurn("r", lease.token, 0, b"damaged")])
        rollout = await b.finish()
        assert rollout.usage.turns == 4
        assert 'reason="unreadable"} 1.0' in b.metrics


async def test_a_replay_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(turn_log, "REPLAY_GRACE_SECONDS", 0.05)
    hangs = [False, True, False]

    async def work(episode: Episode) -> StopReason:
        if hangs.pop(0):
            await anyio.sleep_forever()
        return await FOUR(episode)

    async with bench() as b:
        await b.submit()
        await b.interrupt(2, work)
        assert (await b.finish(work)).usage.turns == 4
        assert 'reason="too_slow"} 1.0' in b.metrics


async def test_an_agent_that_hides_the_difference_is_found_out():
    async def work(episode: Episode) -> StopReason:
        try:
            return await Outputs(["a", "other", "c"])(episode)
        except Exception:  # noqa: BLE001 - as careless agents do
            return StopReason.FINISHED

    async with bench() as b:
        await b.submit()
        await b.interrupt(3)
        assert (await b.finish(work)).usage.turns == 3
        assert 'reason="output_differs"} 1.0' in b.metrics


async def test_a_failed_engine_costs_no_turn():
    async with bench() as b:
        await b.submit()
        b.engine.fails_at = 2
        rollout = await b.finish()
        assert (rollout.attempt, b.engine.sampled, rollout.usage.turns) == (2, 4, 4)
        assert 'rollout_resumes_total{outcome="resumed",reason=""} 1.0' in b.metrics


@pytest.mark.parametrize(
    ("boundary", "stage", "kept"),
    [
        (Boundary.INFERENCE, Stage.ROLLOUT, True),
        (Boundary.SANDBOX, Stage.INIT, True),
        (Boundary.STORE, None, True),
        (Boundary.SANDBOX, Stage.ROLLOUT, False),
        (Boundary.SANDBOX, Stage.EVALUATE, False),
    ],
)
def test_a_failure_that_says_nothing_about_the_work_keeps_the_turns(boundary, stage, kept):
    error = ErrorInfo(code="gone", boundary=boundary, message="gone", retryable=True, stage=stage)
    assert keeps_turns(error) == kept


async def test_time_worked_before_an_interruption_counts_and_the_replay_does_not():
    seconds: list[float] = []

    async def work(episode: Episode) -> StopReason:
        for number in range(3):
            await episode.policy.respond([Message(role="tool", content=str(number))], max_tokens=50)
            seconds.append(episode.clock.seconds)
            await anyio.sleep(0.3)
        return StopReason.FINISHED

    async with bench() as b:
        await b.submit(rollout_seconds=0.8)
        await b.interrupt(2, work)
        before = list(seconds)
        seconds.clear()
        rollout = await b.finish(work)
    assert rollout.error.code == "stage_timeout", "0.6 s before and 0.3 s after are more than 0.8 s"
    assert seconds[1] == pytest.approx(before[1], abs=0.05), "the clock shows what it showed"


async def test_no_limit_is_reached_while_a_clock_stands_still():
    clock = WorkClock()
    with clock.limit(0.05) as scope:
        clock.stop()
        await anyio.sleep(0.1)
        clock.start(0.0)
    assert not scope.cancelled_caught
    with clock.limit(10.0) as scope:
        clock.start(clock.seconds + 11.0)
        await anyio.sleep_forever()
    assert scope.cancelled_caught

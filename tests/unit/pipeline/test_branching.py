"""A branch plays the turns of an earlier rollout again, and is then as if it had run from the start."""

from dataclasses import replace

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api_schemas.rollouts import (
    BranchPoint,
    Rollout,
    RolloutRequest,
    RolloutState,
    Stage,
    StopReason,
    TokenExtras,
)
from api_schemas.tasks import Task
from api_schemas.trajectories import Message, ToolCall
from rollout_service.agents.tool_calling.agent import ToolCallingAgent
from rollout_service.agents.tool_calling.tools import Arguments, FunctionTool
from rollout_service.episodes import Episode
from rollout_service.pipeline.branching import BranchError, earlier_turns
from rollout_service.tokens import check_invariants
from rollout_service.tokens.trajectory import train_on
from tests.support.resumable import FOUR, Bench, Outputs, bench
from tests.support.tokens.characters import CharRenderer

pytestmark = pytest.mark.slow

TURNS = len(FOUR.outputs)


async def run(b: Bench, rollout_id: str, branch_of: BranchPoint | None = None, work=FOUR, **how) -> Rollout:
    await b.submit(rollout_id, branch_of=branch_of)
    return await b.finish(work, rollout_id, **how)


async def from_the_start(work: Outputs, mark: str, marks_from: int) -> Rollout:
    async with bench() as b:
        b.engine.mark, b.engine.marks_from = mark, marks_from
        return await run(b, "r", work=work)


@given(
    turn=st.integers(1, TURNS - 1),
    train_prefix=st.booleans(),
    compacts_at=st.none() | st.integers(1, TURNS - 1),
    interrupted_at=st.none() | st.integers(1, TURNS - 1),
)
@settings(max_examples=20, deadline=None)
async def test_a_branch_is_as_if_it_had_run_from_the_start(turn, train_prefix, compacts_at, interrupted_at):
    work = Outputs(FOUR.outputs, compacts_at)
    async with bench() as b:
        source = await run(b, "source", work=work)
        b.engine.mark, sampled = "!", b.engine.sampled
        await b.submit("r", branch_of=BranchPoint(rollout_id="source", turn=turn, train_prefix=train_prefix))
        if compacts_at is None and interrupted_at is not None and interrupted_at >= turn:
            await b.interrupt(interrupted_at, work)  # the engine counts the turns of a segment
        branch = await b.finish(work)
        assert b.engine.sampled == sampled + TURNS - turn, "no turn before it is sampled, and none twice"
    expected = (await from_the_start(work, "!", turn)).trajectory
    whole = expected if train_prefix else train_on(expected, set(range(turn, TURNS)))
    assert branch.trajectory.segments == whole.segments
    assert branch.trajectory.messages == expected.messages
    check_invariants(branch.trajectory)
    assert (branch.state, branch.reward) == (RolloutState.COMPLETED, source.reward)
    assert branch.usage.turns == TURNS
    assert sum(span.turns_replayed for span in branch.spans if span.stage is Stage.ROLLOUT) >= turn


@given(turns=st.lists(st.integers(1, TURNS - 1), min_size=2, max_size=4), whole=st.booleans())
@settings(max_examples=20, deadline=None)
async def test_branches_of_branches_have_the_tokens_of_all_that_they_are_from(turns, whole):
    async with bench() as b:
        await run(b, "r0")
        answers = ["turn 0", "turn 1", "turn 2", "turn 3"]
        for depth, turn in enumerate(turns, 1):
            b.engine.mark = "!" * depth
            answers = [*answers[:turn], *(f"turn {n}{b.engine.mark}" for n in range(turn, TURNS))]
            point = BranchPoint(rollout_id=f"r{depth - 1}", turn=turn, train_prefix=whole)
            branch = await run(b, f"r{depth}", point)
            check_invariants(branch.trajectory)
            said = [each.content for each in branch.trajectory.messages if each.role == "assistant"]
            assert said == answers
            [segment] = branch.trajectory.segments
            trained = {turn for turn in segment.turn_ids if turn >= 0}
            assert trained == set(range(0 if whole else turn, TURNS))
            assert branch.branch_of == point


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        ("prompt_differs", {"work": Outputs(["a", "other", "c", "d"])}),
        ("prompt_differs", {"renderer": CharRenderer(offset=1_000)}),
        ("ended_early", {"work": Outputs(["a"])}),
        ("ended_early", {"work": Outputs(["a", "b"])}),
    ],
)
async def test_a_branch_whose_earlier_turns_differ_fails_and_samples_nothing(reason, how):
    async with bench() as b:
        await run(b, "source")
        sampled = b.engine.sampled
        branch = await run(b, "r", BranchPoint(rollout_id="source", turn=2), **how)
        assert (branch.state, branch.reward, branch.error.code) == (
            RolloutState.FAILED,
            None,
            "branch_diverged",
        )
        assert reason in branch.error.message
        assert branch.trajectory.segments == []
        assert b.engine.sampled == sampled


async def noting(episode: Episode) -> StopReason:
    """Work like `FOUR`, note a failed call in turn 1, and propose turn 2 and one that is never sampled."""
    messages = [Message(role="user", content="task")]
    for number, output in enumerate(FOUR.outputs):
        turn = await episode.policy.respond(messages, max_tokens=50)
        messages = [Message(role="tool", content=f"{output} {turn.message.content}")]
        if number == 1:
            episode.tool_error_turns.add(number)
        if number in (1, TURNS - 1):
            episode.propose_branch()
    return StopReason.FINISHED


async def test_turns_to_branch_at_are_recorded_also_after_a_crash_and_in_branches():
    async with bench() as b:
        await b.submit("source")
        await b.interrupt(3, noting)
        source = await b.finish(noting, "source")
        branch = await run(b, "r", BranchPoint(rollout_id="source", turn=2), work=noting)
    for found in (source.trajectory, branch.trajectory):
        assert (found.tool_error_turns, found.proposed_turns) == ([1], [2])


async def test_tools_that_differ_after_the_branch_begin_it_anew_from_there():
    async with bench() as b:
        await run(b, "source")
        await b.submit("r", branch_of=BranchPoint(rollout_id="source", turn=1))
        await b.interrupt(3)
        branch = await b.finish(Outputs(["a", "other", "c", "d"]))
        assert (branch.state, branch.usage.turns) == (RolloutState.COMPLETED, TURNS)
        [event] = await b.resume_events()
        assert (event["outcome"], event["reason"]) == ("begun_anew", "output_differs")


@pytest.mark.parametrize(
    ("point", "task", "field", "words"),
    [
        ({"rollout_id": "unknown", "turn": 1}, {}, "rollout_id", "no rollout"),
        ({"rollout_id": "waits", "turn": 1}, {}, "rollout_id", "has not ended"),
        ({"rollout_id": "source", "turn": TURNS}, {}, "turn", f"has {TURNS} turns"),
        ({"rollout_id": "source", "turn": 1}, {"other": 1}, "rollout_id", "this task"),
    ],
)
async def test_a_branch_without_its_earlier_turns_is_refused(point, task, field, words):
    async with bench() as b:
        await run(b, "source")
        await b.submit("waits")
        request = RolloutRequest(task=Task(environment="worked", instance=task))
        with pytest.raises(BranchError, match=words) as caught:
            await earlier_turns(b.store, request, BranchPoint(**point))
        assert caught.value.field == field


async def test_a_branch_whose_source_is_gone_fails():
    async with bench() as b:
        branch = await run(b, "r", BranchPoint(rollout_id="gone", turn=1))
        assert (branch.state, branch.error.code) == (RolloutState.FAILED, "branch_refused")
        assert "no rollout gone" in branch.error.message


async def test_the_time_of_earlier_turns_counts_against_no_limit():
    async def slow(episode):
        await anyio.sleep(0.3 if episode.policy.usage.turns == 0 else 0)
        return await FOUR(episode)

    async with bench() as b:
        await run(b, "source", work=slow)
        await b.submit("r", branch_of=BranchPoint(rollout_id="source", turn=3), rollout_seconds=0.25)
        assert (await b.finish(slow)).state is RolloutState.COMPLETED


async def test_extras_of_earlier_turns_are_not_invented():
    async with bench() as b:
        await run(b, "source")
        point = BranchPoint(rollout_id="source", turn=1)
        request = RolloutRequest(
            rollout_id="r",
            task=Task(environment="worked"),
            branch_of=point,
            exports=TokenExtras(top_logprobs=2),
        )
        await b.store.submit(request)
        branch = await b.finish()
        assert (branch.error.code, branch.trajectory) == ("branch_refused", None)


async def test_results_are_not_reused_of_a_history_that_was_shortened():
    async with bench() as b:
        await run(b, "source", work=Outputs(FOUR.outputs, compacts_at=2))
        request = RolloutRequest(task=Task(environment="worked", instance={}))
        point = BranchPoint(rollout_id="source", turn=3, reuse_results=True)
        with pytest.raises(BranchError, match="shortened") as caught:
            await earlier_turns(b.store, request, point)
        assert caught.value.field == "reuse_results"


class Calling(CharRenderer):
    """A chat format in which every turn but the first is a call."""

    def parse(self, output, prompt, tools, prefix):
        parsed = super().parse(output, prompt, tools, prefix)
        call = ToolCall(id="1", name="look", arguments={}, raw="")
        return replace(parsed, tool_calls=() if parsed.content == "turn 0" else (call,))


@pytest.mark.parametrize("turn", [1, 2, 3])
async def test_results_are_reused_of_their_own_turns_if_others_have_no_calls(turn):
    """As in a dialogue, where the environment answers a turn without a call by a message of its own."""
    looks = 0

    async def look(*_: object) -> str:
        nonlocal looks
        looks += 1
        return f"look {looks}"

    async def dialogue(episode: Episode) -> StopReason:
        agent = ToolCallingAgent([FunctionTool("look", "", Arguments, look)])
        await agent.run(episode, [Message(role="user", content="task")])
        return await agent.run(episode, [Message(role="user", content="go on")])

    async with bench() as b:
        await b.submit("source", max_turns=TURNS)
        await b.finish(dialogue, "source", renderer=Calling())
        await b.submit(branch_of=BranchPoint(rollout_id="source", turn=turn, reuse_results=True), max_turns=TURNS)
        branch = await b.finish(dialogue, renderer=Calling())
    assert branch.state is RolloutState.COMPLETED, branch.error
    shown = [message.content for message in branch.trajectory.messages if message.role == "tool"]
    assert shown == [f"look {n}" for n in (*range(1, turn), *range(TURNS + turn, 2 * TURNS))]

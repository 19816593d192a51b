"""An agent that hands on work: what runs when, what the policy reads, and what is written down of it."""

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

import anyio
import pytest

from api_schemas.rollouts import Rollout, RolloutState, StopReason
from api_schemas.rollouts.trees import InvalidBecause
from api_schemas.trajectories import Message
from rollout_service.agents.parallel.calls import ParallelAgent
from rollout_service.agents.parallel.settings import ParallelSettings, SubagentSettings
from rollout_service.agents.parallel.tools import RESULT_RULE, marked_result
from rollout_service.agents.tool_calling.builtin_tools import FINISH
from rollout_service.agents.tool_calling.tools import Arguments, FunctionTool, ToolResult
from rollout_service.base.errors import EnvironmentFailedError, UnavailableError
from rollout_service.episodes import Episode, EpisodeLimits
from rollout_service.groups.auxiliary import raw_parts
from rollout_service.groups.statistics import work_sums
from rollout_service.testing.scripted_policy import (
    call,
    malformed_call,
    turn,
)
from tests.support.episodes import scripted_episode
from tests.support.sub_agents import ScriptedSubagents

TASK = [Message(role="system", content="You lead."), Message(role="user", content="Add A B.")]


class Key(Arguments):
    key: str


@dataclass
class Played:
    """A played episode, and why its agent stopped."""

    reason: StopReason
    episode: Episode
    host: ScriptedSubagents
    events: list[str] = field(default_factory=list)

    @property
    def results(self) -> list[str]:
        return [message.content for message in self.episode.policy.messages if message.role == "tool"]

    @property
    def assigns(self):
        return self.episode.work.assigns


def create(name="a", system_prompt="Look up."):
    return call("create_subagent", name=name, system_prompt=system_prompt)


def assign(prompt="A", agent="a"):
    return call("assign_task", agent=agent, prompt=prompt)


def worker(result="7"):
    """Return the turns of a sub-agent that calls a tool and gives a result."""
    return [turn("", call("read", key="k")), f"It is <result>{result}</result>"]


def scored(episode):
    return Rollout(
        rollout_id="r",
        state=RolloutState.COMPLETED,
        task=episode.request.task,
        pool="policy",
        reward=1.0,
        work=episode.work,
        nodes=episode.nodes,
        created_at=datetime.now(UTC),
    )


async def play(
    script,
    workers=lambda agent: worker(),
    *,
    limits=None,
    slots=64,
    delay=0.0,
    host=ScriptedSubagents,
    keep=None,
    tools=(),
    **settings,
):
    events = []

    def tool(name, *, parallel):
        async def run(arguments, context):
            events.append(f"{name} {arguments.key}")
            return f"{name} of {arguments.key}"

        return FunctionTool(name, "", Key, run, parallel=parallel)

    read, write = tool("read", parallel=True), tool("write", parallel=False)
    host = host(workers, slots=slots, delay=delay)
    episode = scripted_episode(script, limits=limits or {}, subagents=host)
    if keep is not None:
        keep.append(episode)
    agent = ParallelAgent(ParallelSettings(**settings), [read, write, *tools, FINISH], [read, write])
    reason = await agent.run(episode, TASK)
    return Played(reason, episode, host, events)


async def test_create_and_assign_work_in_one_turn_whatever_their_order():
    played = await play([turn("", assign("A"), create(), assign("B")), "Done."])
    assert played.reason is StopReason.ANSWERED
    assert played.results == ["7", "created a", "7"]
    assert [node.prompt.user for node in played.episode.nodes] == ["A", "B"]
    assert played.episode.nodes[0].prompt.system == f"Look up.\n\n{RESULT_RULE}"
    assert [node.node_id for node in played.episode.nodes] == ["r/1", "r/2"]
    work = played.episode.work
    assert (work.critical_steps, work.scheduled_steps, work.total_steps) == (1 + 2 + 1, 4, 2 + 4)
    assert (work.width_max, work.waves, work.balance, work.created) == (2, 1, 1.0, 1)
    assert work.assigns.model_dump() == {
        "attempted": 2,
        "executed": 2,
        "valid": 2,
        "duplicate": 0,
        "over_cap": 0,
        "refused": 0,
        "abandoned": 0,
    }


async def test_a_sub_agent_sees_its_task_alone_and_gives_its_result_alone():
    played = await play([turn("Secret plan.", create(), assign("A")), "Done."])
    ((_, policy),) = played.host.opened
    assert [message.content for message in policy.messages[:2]] == [f"Look up.\n\n{RESULT_RULE}", "A"]
    assert "plan" not in str(policy.messages)
    assert "read of k" not in str(played.episode.policy.messages)
    assert [tool["function"]["name"] for tool in policy.tools] == ["read", "write"]


async def test_the_task_precedes_the_assignment_on_request():
    script = [turn("", create(), assign("A")), "Done."]
    played = await play(script, subagent=SubagentSettings(sees_task=True))
    ((_, policy),) = played.host.opened
    assert policy.messages[1].content == "Add A B.\n\nA"


async def test_assign_direct_assign_is_one_wave_and_results_are_in_call_order():
    delays = {"slow": 0.05, "fast": 0.0}

    started, ended = [], []

    class Host(ScriptedSubagents):
        async def open(self, pool, tools, *, agent, temperature):
            started.append(agent)
            await anyio.sleep(delays[agent])
            ended.append(agent)
            return await super().open(pool, tools, agent=agent, temperature=temperature)

    script = [
        turn(
            "",
            create("slow"),
            create("fast"),
            assign("A", "slow"),
            call("read", key="x"),
            assign("B", "fast"),
            call("write", key="y"),
        ),
        "Done.",
    ]
    played = await play(script, worker, host=Host)
    assert started == ["slow", "fast"]
    assert ended == ["fast", "slow"]
    assert played.results == ["created slow", "created fast", "slow", "read of x", "fast", "write of y"]
    assert played.events[-1] == "write y", "tools that change something run after the wave"
    assert played.episode.work.waves == 1
    assert played.episode.work.direct_calls == 2


async def test_eight_assigns_take_the_time_of_one():
    seconds = []
    for width in (1, 8):
        prompts = [assign(f"task {number}") for number in range(width)]
        played = await play([turn("", create(), *prompts), "Done."], delay=0.2)
        seconds.append(played.episode.work.seconds)
    assert seconds[1].critical < 4 * seconds[0].critical
    assert seconds[1].active > 4 * seconds[0].active


async def test_more_assigns_than_the_width_take_several_waves():
    script = [turn("", create(), *[assign(f"task {number}") for number in range(5)]), "Done."]
    played = await play(script, max_width=2)
    work = played.episode.work
    assert (work.critical_steps, work.scheduled_steps, work.waves) == (2 + 2, 2 + 3 * 2, 3)
    assert [node.parent.wave for node in played.episode.nodes] == [0, 0, 1, 1, 2]


async def test_the_same_name_again_is_no_mistake_unless_its_prompt_differs():
    script = [turn("", create(), create(), create("a", "Other.")), "Done."]
    played = await play(script)
    assert played.results[:2] == ["created a", "created a"]
    assert "another system prompt" in played.results[2]
    assert played.episode.work.created == 1


async def test_a_call_that_cannot_be_carried_out_says_why_and_costs_nothing():
    script = [
        turn(
            "",
            assign("A", "nobody"),
            create(),
            assign(" "),
            assign("x" * 8_193),
            call("assign_task", agent="a"),
            malformed_call(),
            create("b", ""),
        ),
        "Done.",
    ]
    played = await play(script)
    unknown, _, empty, long, missing, malformed, no_prompt = played.results
    assert "no sub-agent 'nobody'" in unknown
    assert unknown.endswith("Sub-agents: a")
    assert "prompt is empty" in empty
    assert "8193 characters, over 8192" in long
    assert "prompt is missing" in missing
    assert "malformed" in malformed
    assert "system_prompt is empty" in no_prompt
    assert (played.assigns.attempted, played.assigns.refused, played.assigns.executed) == (4, 4, 0)
    assert played.episode.nodes == []
    assert played.episode.work.critical_steps == 2


async def test_assigns_over_the_cap_are_refused_with_a_text():
    prompts = [assign(f"task {number}") for number in range(4)]
    script = [turn("", create(), *prompts), turn("", *prompts[2:]), "Done."]
    played = await play(script, max_assigns_per_turn=2, max_assigns=3)
    assert "in a later turn" in played.results[3]
    assert "no more can be" in played.results[6]
    assert (played.assigns.attempted, played.assigns.executed, played.assigns.over_cap) == (6, 3, 3)


async def test_agents_over_the_cap_are_refused_with_a_text():
    played = await play([turn("", create("a"), create("b"), create("c")), "Done."], max_agents=2)
    assert "no more can be created" in played.results[2]


@pytest.mark.parametrize("prompt", ["A", "A ", "A\n", " A", "A\u200b"])
@pytest.mark.parametrize("agent", ["a", "b"])
async def test_the_same_task_again_runs_and_is_flagged_in_disguise_too(prompt, agent):
    script = [turn("", create("a"), create("b", "Look  up. "), assign("A"), assign(prompt, agent)), "Done."]
    played = await play(script)
    assert [node.duplicate for node in played.episode.nodes] == [False, True]
    assert (played.assigns.executed, played.assigns.duplicate) == (2, 1)
    assert played.episode.work.width_max == 1


async def test_the_same_task_for_an_agent_with_other_instructions_is_another_one():
    script = [turn("", create("a"), create("b", "Doubt."), assign("A"), assign("A", "b")), "Done."]
    played = await play(script)
    assert (played.assigns.executed, played.assigns.duplicate) == (2, 0)
    assert played.episode.work.width_max == 2


@pytest.mark.slow
@pytest.mark.parametrize("scarce", [{"max_width": 1}, {"slots": 1}], ids=["waves", "slots"])
async def test_tasks_that_never_began_did_not_run(scarce):
    prompts = [assign(f"task {number}") for number in range(8)]
    episodes = []
    played = await play(
        [turn("", create(), *prompts)],
        delay=0.3,
        keep=episodes,
        limits=EpisodeLimits(agent_seconds=1.0),
        **scarce,
    )
    assert played.reason is StopReason.AGENT_TIMEOUT
    work = episodes[0].work
    assert 1 <= work.assigns.executed < 8
    assert (work.assigns.attempted, work.assigns.abandoned) == (8, 8 - work.assigns.executed)
    assert work.width_max == work.assigns.executed
    assert raw_parts(work, max_assigns=8, max_width=8)["parallel"] == work.assigns.executed / 8
    assert work_sums([scored(episodes[0])])["nodes"] == work.assigns.executed, "the figures look at what ran"


async def test_the_answer_wins_over_the_assigns_of_its_turn():
    played = await play([turn("", create(), assign("A"), call("finish", answer="9"))])
    assert played.reason is StopReason.FINISHED
    assert played.episode.answer == "9"
    assert (played.assigns.abandoned, played.assigns.executed) == (1, 0)
    assert played.host.opened == []


async def test_a_tool_that_ends_the_agent_does_so_after_the_tasks_of_its_turn():
    async def submit(arguments, context):
        return ToolResult("", answer=arguments.key)

    played = await play(
        [turn("", create(), assign("A"), call("submit", key="9"))],
        tools=[FunctionTool("submit", "", Key, submit)],
    )
    assert played.reason is StopReason.FINISHED
    assert played.episode.answer == "9"
    assert played.assigns.executed == 1


async def test_a_call_that_fails_beside_a_task_is_an_error_of_its_turn():
    played = await play([turn("", create(), assign("A"), call("read", wrong=1)), "Done."])
    assert played.episode.tool_error_turns == {0}


@pytest.mark.parametrize(
    ("script", "reason", "text"),
    [
        (["<result>7</result>"], InvalidBecause.NO_TOOL_CALL, "7\n[the sub-agent called no tool]"),
        ([turn("", call("read", key="k")), "It is 7."], InvalidBecause.NO_RESULT, None),
        ([turn("", call("read", key="k")), ""], InvalidBecause.EMPTY, "[the sub-agent gave no result]"),
        ([turn("", call("read", key="k")), turn("It is", truncated=True)], InvalidBecause.TRUNCATED, None),
        ([turn("", call("read", key="k")), turn("It", context_full=True)], InvalidBecause.CONTEXT_FULL, None),
        ([turn("", call("read", key="k"))] * 9, InvalidBecause.MAX_TURNS, None),
        ([turn("", *[call("read", key="k")] * 11)], InvalidBecause.MAX_TOOL_CALLS, None),
        ([turn("", malformed_call())] * 9, InvalidBecause.MALFORMED, None),
    ],
)
async def test_what_a_sub_agent_did_wrong_is_an_invalid_result_with_its_reason(script, reason, text):
    played = await play([turn("", create(), assign("A")), "Done."], lambda agent: script)
    (node,) = played.episode.nodes
    assert (node.valid, node.invalid_because) == (False, reason)
    assert played.reason is StopReason.ANSWERED
    assert played.assigns.valid == 0
    if text is not None:
        assert played.results[-1] == text


async def test_the_last_result_block_counts_and_a_long_one_is_cut():
    long = "x" * 500
    script = [turn("", call("read", key="k")), f"<result>1</result> or <result>{long}</result>"]
    played = await play([turn("", create(), assign("A")), "Done."], lambda agent: script, result_chars=100)
    assert played.results[-1].startswith("xxx")
    assert len(played.results[-1]) <= 100


@pytest.mark.slow
async def test_a_sub_agent_out_of_time_is_invalid_and_its_queue_does_not_count():
    settings = SubagentSettings(seconds=1.0)
    prompts = [assign(f"task {number}") for number in range(3)]
    played = await play([turn("", create(), *prompts), "Done."], slots=1, delay=0.3, subagent=settings)
    assert played.assigns.valid == 3, "each waited for a slot while the others worked"
    assert played.episode.work.seconds.queued > 0
    slow = await play([turn("", create(), assign()), "Done."], delay=3.0, subagent=settings)
    assert slow.episode.nodes[0].invalid_because is InvalidBecause.TIMEOUT


async def test_an_engine_that_fails_is_retried_alone():
    looks = turn("", call("read", key="k"))
    scripts = iter([[UnavailableError("gone")], [looks, UnavailableError("gone")], worker("9")])
    played = await play([turn("", create(), assign()), "Done."], lambda agent: next(scripts))
    assert played.results[-1] == "9"
    (node,) = played.episode.nodes
    assert (node.critical_steps, node.main_steps) == (2, [1, 1]), "what failed costs no steps"
    sampled = [policy.usage.sampled_tokens for _, policy in played.host.opened]
    assert (node.usage.turns, node.usage.tool_calls, node.usage.sampled_tokens) == (3, 2, sum(sampled))
    assert played.episode.work.subagent_tokens == sum(sampled)


async def test_an_engine_that_stays_gone_fails_the_rollout_and_ends_the_others():
    scripts = {"a": [UnavailableError("gone")], "b": [turn("", call("read", key="k"))] * 50}
    script = [turn("", create("a"), create("b"), assign("A", "a"), assign("B", "b"))]
    episodes = []
    with pytest.raises(UnavailableError):
        await play(script, lambda agent: scripts[agent], delay=0.02, keep=episodes)
    (episode,) = episodes
    assert [node.invalid_because for node in episode.nodes] == [
        InvalidBecause.ERROR,
        InvalidBecause.CANCELLED,
    ]
    assert episode.nodes[0].error.code == "unavailable"
    assert episode.work.assigns.executed == 2


async def test_the_steps_of_a_task_bound_its_waves():
    prompts = [assign(f"task {number}") for number in range(4)]
    played = await play(
        [turn("", create(), *prompts), "Done."], max_critical_steps=4, max_width=2, charge_direct_calls=True
    )
    first, second = played.episode.nodes[:2], played.episode.nodes[2:]
    assert all(node.valid for node in first)
    assert {node.invalid_because for node in second} == {InvalidBecause.MAX_CRITICAL_STEPS}
    assert played.reason is StopReason.MAX_CRITICAL_STEPS
    assert played.episode.work.scheduled_steps == 4


async def test_direct_calls_are_charged_on_request():
    script = [turn("", *[call("read", key="k")] * 3), "Done."]
    free, charged = await play(script), await play(script, charge_direct_calls=True)
    assert free.episode.work.main_steps == [1, 1]
    assert charged.episode.work.main_steps == [3, 1]
    stopped = await play([*script[:1] * 3, "Done."], charge_direct_calls=True, max_critical_steps=6)
    assert stopped.reason is StopReason.MAX_CRITICAL_STEPS
    assert stopped.episode.work.critical_steps == 6


async def test_sub_agents_hand_on_work_down_to_the_depth_and_no_further():
    scripts = {
        "lead": [turn("", create("leaf"), assign("B", "leaf")), "<result>led</result>"],
        "leaf": [turn("", create("deeper"), call("read", key="k")), "<result>leaf</result>"],
    }
    script = [turn("", create("lead"), assign("A", "lead")), "Done."]
    played = await play(script, lambda agent: scripts[agent], max_depth=2, slots=1)
    lead, leaf = played.episode.nodes
    assert (lead.valid, leaf.valid) == (True, True)
    assert leaf.parent.node_id == lead.node_id
    assert lead.critical_steps == 2 + 2
    assert played.episode.work.critical_steps == 2 + 4
    (_, policy) = played.host.opened[1]
    assert "There is no tool 'create_subagent'" in str(policy.messages)


async def test_a_trial_without_a_host_says_what_to_do():
    episode = scripted_episode(["Done."])
    with pytest.raises(EnvironmentFailedError) as failed:
        await ParallelAgent(ParallelSettings(), [], []).run(episode, TASK)
    assert "frozen pool" in failed.value.hint


def test_the_last_marked_result_counts_and_many_beginnings_cost_little():
    assert marked_result("<result>1</result> or <result> <result>2 </result>, <result>") == "<result>2"
    assert marked_result("</result> 1 <result>") is None
    begun = time.process_time()
    assert marked_result("<result>" * 20_000) is None
    assert time.process_time() - begun < 5  # quadratic time would be much more

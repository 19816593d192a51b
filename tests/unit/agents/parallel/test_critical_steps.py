"""Critical steps are what a computation from the exported nodes alone gives, for any tree."""

from functools import partial

import anyio
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts.trees import AgentNode, Work
from api_schemas.trajectories import Message
from rollout_service.agents.parallel.calls import ParallelAgent
from rollout_service.agents.parallel.ledger import Steps, TurnSteps, add_up
from rollout_service.agents.parallel.settings import ParallelSettings, SubagentSettings
from rollout_service.agents.tool_calling.builtin_tools import FINISH
from rollout_service.agents.tool_calling.tools import Arguments, FunctionTool
from rollout_service.base.errors import UnavailableError
from rollout_service.testing.scripted_policy import call, turn
from tests.support.episodes import scripted_episode
from tests.support.sub_agents import ScriptedSubagents


class NoArguments(Arguments):
    """A tool without arguments."""


async def _look(arguments, context):
    return "seen"


LOOK = FunctionTool("look", "", NoArguments, _look, parallel=True)

endings = st.sampled_from(["<result>1</result>", "no result", ""])
leaves = st.fixed_dictionaries(
    {"turns": st.lists(st.tuples(st.integers(0, 3), st.just([])), max_size=3), "ending": endings}
)
trees = st.recursive(
    leaves,
    lambda children: st.fixed_dictionaries(
        {
            "turns": st.lists(st.tuples(st.integers(0, 3), st.lists(children, max_size=4)), max_size=3),
            "ending": endings,
        }
    ),
    max_leaves=12,
)


def script_of(tree, name, scripts):
    """Return the turns of an agent, and put those of its sub-agents into `scripts`."""
    script = []
    for number, (looks, children) in enumerate(tree["turns"]):
        calls = [call("look")] * looks
        for index, child in enumerate(children):
            agent = f"{name}.{number}.{index}"
            scripts[agent] = script_of(child, agent, scripts)
            calls += [
                call("create_subagent", name=agent, system_prompt="Work."),
                call("assign_task", agent=agent, prompt="Now."),
            ]
        if calls:
            script.append(turn("", *calls))
    return [*script, tree["ending"]]


async def played(tree, options, fails_first):
    scripts = {}
    script = script_of(tree, "root", scripts)
    failed = set()

    def worker(agent):
        if agent in fails_first and agent not in failed:
            failed.add(agent)
            return [UnavailableError("gone")]
        return scripts[agent]

    episode = scripted_episode(script, subagents=ScriptedSubagents(worker))
    agent = ParallelAgent(options, [LOOK, FINISH], [LOOK])
    await agent.run(episode, [Message(role="user", content="Go.")])
    return episode


def critical_of(nodes: list[AgentNode], node_id: str, main_steps: list[int], *, by_wave: bool) -> int:
    """Compute steps from what is exported, and from nothing else."""
    steps = 0
    for number, main in enumerate(main_steps):
        waves: dict[int, list[int]] = {}
        for node in nodes:
            if (node.parent.node_id, node.parent.turn) == (node_id, number):
                cost = critical_of(nodes, node.node_id, node.main_steps, by_wave=by_wave)
                waves.setdefault(node.parent.wave if by_wave else 0, []).append(cost)
        steps += main + sum(map(max, waves.values()))
    return steps


def assert_agrees(nodes: list[AgentNode], work: Work) -> None:
    assert work.critical_steps == critical_of(nodes, "", work.main_steps, by_wave=False)
    assert work.scheduled_steps == critical_of(nodes, "", work.main_steps, by_wave=True)
    assert work.total_steps == sum(work.main_steps) + sum(sum(node.main_steps) for node in nodes)
    for node in nodes:
        assert node.critical_steps == critical_of(nodes, node.node_id, node.main_steps, by_wave=False)
    assert work.critical_steps <= work.scheduled_steps <= work.total_steps
    assert work.assigns.executed == len(nodes)
    assert work.assigns.valid == sum(node.valid for node in nodes)
    assert work.assigns.attempted == work.assigns.executed + work.assigns.over_cap + work.assigns.refused


@given(
    trees,
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(2, 8)),
    st.sets(st.sampled_from(["root.0.0", "root.0.1", "root.1.0", "root.0.0.0.0"])),
)
def test_they_equal_a_computation_from_the_exported_nodes(tree, width, charged, depth, budget, fails_first):
    options = ParallelSettings(
        max_width=width,
        charge_direct_calls=charged,
        max_depth=depth,
        max_critical_steps=budget,
        subagent=SubagentSettings(needs_tool_call=False),
    )
    episode = anyio.run(partial(played, tree, options, fails_first))
    assert_agrees(episode.nodes, episode.work)


def test_the_published_example():
    subs = [[3, 5, 0], [0, 0, 0], [7, 2, 2]]
    turns = [TurnSteps(1, [[Steps(sub, sub, sub) for sub in turn]]) for turn in subs]
    assert add_up(turns) == Steps(critical=15, scheduled=15, total=3 + 19)
    assert add_up([TurnSteps(1), TurnSteps(1)]) == Steps(2, 2, 2), "without sub-agents, the steps of the agent"
    assert add_up([]) == Steps()

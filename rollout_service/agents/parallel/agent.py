"""The built-in agent with sub-agents: the policy decides whether, when and how widely to hand on work.

`Episode.nodes` and `Episode.work` record the work, however the agent ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.agents.parallel.calls import ParallelCalls, with_delegation
from rollout_service.agents.parallel.settings import ParallelSettings
from rollout_service.agents.parallel.tree import AgentTree
from rollout_service.agents.tool_calling.agent import ToolCallingAgent
from rollout_service.agents.tool_calling.tools import Tool, by_name
from rollout_service.episodes import Episode
from rollout_service.tokens import ToolSpec


class ParallelAgent:
    def __init__(self, settings: ParallelSettings, tools: Sequence[Tool], subagent_tools: Sequence[Tool]) -> None:
        self._settings = settings
        self._tools = list(by_name(tools).values())
        self._subagent_tools = list(by_name(subagent_tools).values())

    @property
    def definitions(self) -> list[ToolSpec]:
        return with_delegation([tool.definition for tool in self._tools])

    async def run(self, episode: Episode, messages: Sequence[Message]) -> StopReason:
        episode.nodes.clear()
        tree = AgentTree(self._settings, episode, episode.require_subagents())
        calls = ParallelCalls(tree, self._tools, self._subagent_tools, allowance=self._settings.max_critical_steps)
        try:
            return await ToolCallingAgent(calls=calls).run(episode, messages)
        finally:
            episode.work = tree.work(calls.ledger)

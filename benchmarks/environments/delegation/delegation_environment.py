"""An environment for benchmarks: the agent assigns as many tasks as it is told to, all in one turn, and then answers.

It needs no sandbox. The parts of its score say what became of the tasks and how long they waited. The folder is a
plug-in for a service that has it on its PYTHONPATH.
"""

from __future__ import annotations

from rollout_service.agents.parallel.settings import ParallelSettings, SubagentSettings
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.episodes import Episode, EpisodeLimits, Score

MOST_TASKS = 100


class Delegation(AgentEnvironment):
    """Scores 1 if every assigned task has a valid result."""

    async def evaluate(self, episode: Episode) -> Score:
        """Return the score, with what the benchmark looks at as its parts."""
        work = episode.work
        if work is None:
            return Score(0.0)
        return Score(
            float(work.assigns.valid == episode.instance["tasks"]),
            {
                "valid": float(work.assigns.valid),
                "queued": work.seconds.queued,
                "critical_seconds": work.seconds.critical,
            },
        )


def delegation() -> Delegation:
    return Delegation(
        EnvironmentSpec(
            name="delegation",
            description="Assigns as many tasks as it is told to: for benchmarks.",
            prompt="Assign {{ instance.tasks }} {{ instance.kind }} tasks.",
            limits=EpisodeLimits(
                max_turns=2,
                max_tokens=100_000,
                max_turn_tokens=50_000,
                agent_seconds=1_200.0,
                rollout_seconds=2_400.0,
            ),
            parallel=ParallelSettings(
                max_assigns_per_turn=MOST_TASKS,
                max_assigns=MOST_TASKS,
                subagent=SubagentSettings(max_turns=1, needs_tool_call=False),
            ),
        )
    )

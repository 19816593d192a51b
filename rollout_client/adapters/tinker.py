"""Tinker cookbook: groups of rollouts for its RL loop and its evaluators. Tested with tinker-cookbook 0.6.1.

    RolloutGroup(row, group_size=8)                            # what your RLDataset returns: an EnvGroupBuilder
    train.Config(rollout_error_tolerance=ServiceStrategy(), ...)     # who runs its rollouts: the service

Rows have `environment` and `instance`. Both classes are subclasses of the cookbook's own, and can be pickled.

Each turn is a transition, whose observation is the prompt that the engine read, so the cookbook's own
`assemble_training_data` makes a datum of each segment, with the masks and log-probabilities of the service. The reward
is on the last transition. A rollout without a reward is run again, which the cookbook counts under
`rollout_errors/NoRewardError`; if it still has none, the cookbook drops the group, with one warning, and counts it
under `rollout_errors/groups_skipped`, in training as in an evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from api_schemas.rollouts import Rollout, RolloutRequest, StopReason
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason
from rollout_client.adapters.samples import SampledTurn, samples_of, turns_of
from rollout_client.adapters.submit import NoRewardError, RolloutSubmitter, parse_task, run_in_order

STOPS = {
    StopReason.FINISHED: "completed",
    StopReason.ANSWERED: "completed",
    StopReason.MAX_TURNS: "max_turns",
    StopReason.MAX_TOKENS: "max_sampled_tokens",
    StopReason.CONTEXT_FULL: "context_overflow",
    StopReason.TRUNCATED: "max_tokens",
    StopReason.MALFORMED: "parse_error",
    StopReason.AGENT_TIMEOUT: "rollout_timeout",
    StopReason.MAX_TOOL_CALLS: "max_tool_calls",
}
"""The cookbook's names of reasons to stop, by which its termination policy changes rewards; it has none for others."""


def is_cut_off(rollout: Rollout, turn: SampledTurn) -> bool:
    reasons = rollout.trajectory.finish_reasons if rollout.trajectory is not None else []
    return turn.number < len(reasons) and reasons[turn.number] is FinishReason.LENGTH


def trajectory_of(rollout: Rollout) -> Any:
    """Return a rollout that has a reward as the cookbook's `Trajectory`."""
    import tinker
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Trajectory, Transition

    transitions = [
        Transition(
            ob=tinker.ModelInput.from_ints(turn.prompt_ids),
            ac=TokensWithLogprobs(
                tokens=turn.sampled_ids,
                maybe_logprobs=turn.logprobs,
                stop_reason="length" if is_cut_off(rollout, turn) else "stop",
            ),
            reward=0.0,
            episode_done=False,
            logs={"rollout_id": rollout.rollout_id, "versions": str(sorted(set(turn.versions)))},
        )
        for sample in samples_of(rollout)
        for turn in turns_of(sample)
    ]
    stop = STOPS.get(rollout.stop_reason) if rollout.stop_reason is not None else None
    last = transitions[-1]
    last.reward, last.episode_done = rollout.reward, True
    last.metrics = {f"stop/{stop}": 1.0} if stop is not None else {}
    return Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty(), stop_reason=stop)


def metrics_of(rollout: Rollout) -> dict[str, float]:
    """Return metrics whose means the cookbook logs under `env/all`."""
    return {
        "rollouts/segments": float(len(samples_of(rollout))),
        "rollouts/turns": float(rollout.usage.turns),
    }


@dataclass(frozen=True)
class GroupTask:
    row: Any
    """A task, or a row that names one; see `submit.parse_task`."""
    group_size: int
    submitter: RolloutSubmitter = field(default_factory=RolloutSubmitter.from_environment)
    tags: tuple[str, ...] | None = None
    """The cookbook's tags for metrics; the environment's name by default."""

    def __post_init__(self) -> None:
        """Read the row.

        Raises:
            TaskRowError: The row does not name a task. Later, the cookbook would only skip the group.
        """
        object.__setattr__(self, "row", parse_task(self.row))

    @property
    def task(self) -> Task:
        task: Task = self.row
        return task

    def logging_tags(self) -> list[str]:
        return [self.task.environment] if self.tags is None else list(self.tags)

    async def compute_group_rewards(self, trajectory_group: Any, env_group: Any) -> list[tuple[float, Any]]:
        """Return metrics, and nothing to add to the rewards."""
        del trajectory_group
        return [(0.0, metrics_of(env.rollout)) for env in env_group]


@dataclass
class RolloutPlace:
    """The place of one rollout in its group; the cookbook hands it back when it asks for metrics."""

    request: RolloutRequest
    submitter: RolloutSubmitter
    rollout: Rollout | None = None
    failures: list[Rollout] = field(default_factory=list)
    """Attempts that ended without a reward."""

    async def run(self) -> None:
        self.rollout = await self.submitter.run_scored(self.request, on_failure=self.failures.append)


def request_for(group: GroupTask, policy: Any) -> RolloutRequest:
    """Use the temperature and the limit per turn of the cookbook's token completer."""
    return group.submitter.request(
        group.row,
        {"temperature": getattr(policy, "temperature", None)},
        max_turn_tokens=getattr(policy, "max_tokens", None),
        trainer="tinker",
    )


@lru_cache(maxsize=1)
def make_classes() -> Mapping[str, type]:
    """Return the classes that need the cookbook's base classes; the module has them as attributes, for pickles."""
    from tinker_cookbook.exceptions import AllTrajectoriesFailedError
    from tinker_cookbook.rl.rollout_strategy import RolloutResult, RolloutStrategy
    from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RolloutError

    class RolloutEnv(RolloutPlace, Env):  # type: ignore[misc]
        async def initial_observation(self) -> Any:
            """Refuse: the service makes the observations, and samples after them."""
            raise NotImplementedError(
                "the rollouts of a RolloutGroup run at the service: set rollout_error_tolerance=ServiceStrategy() in "
                "train.Config, or strategy=ServiceStrategy() in an evaluator"
            )

        async def step(self, action: Any, *, extra: Any = None) -> Any:
            del action, extra
            return await self.initial_observation()

    class RolloutGroup(GroupTask, EnvGroupBuilder):  # type: ignore[misc]
        async def make_envs(self) -> Sequence[Any]:
            return self.members(None)

        def members(self, policy: Any) -> list[Any]:
            return [RolloutEnv(request_for(self, policy), self.submitter) for _ in range(self.group_size)]

    @dataclass(frozen=True)
    class ServiceStrategy(RolloutStrategy):  # type: ignore[misc]
        """Runs the rollouts of a `RolloutGroup` at the service; a group is complete or dropped."""

        @property
        def catches_group_errors(self) -> bool:
            """Whether the cookbook counts errors and goes on without the group."""
            return True

        async def execute(self, env_group_builder: Any, policy: Any) -> Any:
            """Run a group; the cookbook calls this.

            Raises:
                AllTrajectoriesFailedError: A rollout has no reward; the cookbook then drops the group.
            """
            members = env_group_builder.members(policy)
            try:
                await run_in_order([member.run for member in members])
            except NoRewardError as error:
                raise AllTrajectoriesFailedError(f"{error} Its group is dropped.") from error
            errors = [
                RolloutError(NoRewardError.__name__, str(NoRewardError(failure)))
                for member in members
                for failure in member.failures
            ]
            trajectories = [trajectory_of(member.rollout) for member in members]
            return RolloutResult(trajectories=trajectories, envs=members, errors=errors)

    made = {one.__name__: one for one in (RolloutEnv, RolloutGroup, ServiceStrategy)}
    for name, one in made.items():
        one.__qualname__ = name
    return made


def __getattr__(name: str) -> Any:
    # Made on first use, since their bases are the cookbook's.
    if name in ("RolloutEnv", "RolloutGroup", "ServiceStrategy"):
        return make_classes()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

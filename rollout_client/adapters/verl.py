"""verl: an agent loop. Checked against the interface of verl 0.9.1.

    # agent_loops.yaml, named by actor_rollout_ref.rollout.agent.agent_loop_config_path
    - name: rollout_service
      _target_: rollout_client.adapters.verl.RolloutAgentLoop
      url: http://node-3:8080

The data set also needs a column `agent_name` with `rollout_service`, next to `environment` and `instance` (in the row,
or in its `extra_info`). verl makes an instance for each sample and calls `run`; it requires no base class.

Guarantees: those of the package. verl requires a reward for each sample: a rollout without one is run again, and then
NoRewardError is raised. verl takes one row per rollout, no longer than `response_length`; the extra field `left_out`
counts the tokens that it did not get.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from api_schemas.rollouts import Rollout, Stage
from rollout_client.adapters.samples import largest_sample, samples_of
from rollout_client.adapters.submit import RolloutSubmitter, read_sampling

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput


@lru_cache(maxsize=8)
def submitter_at(url: str | None, key: str | None) -> RolloutSubmitter:
    """Return the submitter that all samples of a process share, with its connections."""
    given = {name: value for name, value in (("url", url), ("key", key)) if value is not None}
    return RolloutSubmitter.from_environment(**given)


class RolloutAgentLoop:
    """Runs one rollout at the service for a sample of verl."""

    def __init__(
        self, trainer_config: Any, *, url: str | None = None, key: str | None = None, **_: object
    ) -> None:
        """Read `url` and `key` from the configuration of the agent loop; the rest is verl's."""
        self.submitter = submitter_at(url, key)
        self.response_length = int(trainer_config.config.actor_rollout_ref.rollout.response_length)

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput:
        """Run a rollout of the row's task."""
        request = self.submitter.request(
            task_row(row),
            sampling=read_sampling(sampling_params),
            max_tokens=self.response_length,
            metadata={"trainer": "verl"},
        )
        rollout = await self.submitter.run_scored(request)
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

        fields = output_fields(rollout, self.response_length)
        return AgentLoopOutput(**fields, metrics=AgentLoopMetrics(**metrics(rollout)))


def task_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of verl's row that names the task: the row, or its `extra_info`."""
    extra = row.get("extra_info")
    return extra if "environment" not in row and isinstance(extra, Mapping) else row


def output_fields(rollout: Rollout, response_length: int) -> dict[str, Any]:
    """Return the fields of verl's AgentLoopOutput, without its metrics."""
    samples = samples_of(rollout)
    chosen = largest_sample(samples)
    if chosen is None:
        raise ValueError(f"rollout {rollout.rollout_id} sampled nothing")
    sample = chosen.cut(response_length)
    versions = [version for version in sample.versions if version >= 0]
    return {
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "response_mask": sample.response_mask,
        "response_logprobs": sample.logprobs,
        "reward_score": sample.reward,
        "num_turns": len(rollout.trajectory.messages) if rollout.trajectory else 0,
        "extra_fields": {
            "rollout_id": rollout.rollout_id,
            "min_global_steps": min(versions, default=None),
            "max_global_steps": max(versions, default=None),
            "left_out": sum(one.sampled for one in samples) - sample.sampled,
            "turn_scores": [],
            "tool_rewards": [],
        },
    }


def metrics(rollout: Rollout) -> dict[str, float]:
    """Return the seconds in the engine, in tools and in scoring, under the names of verl's metrics."""
    return {
        "generate_sequences": sum(span.engine_seconds for span in rollout.spans),
        "tool_calls": sum(span.tool_seconds for span in rollout.spans),
        "compute_score": sum(span.seconds for span in rollout.spans if span.stage is Stage.EVALUATE),
    }

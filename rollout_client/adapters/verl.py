"""verl: an agent loop. Checked against the interface of verl 0.9.1.

    # agent_loops.yaml, named by actor_rollout_ref.rollout.agent.agent_loop_config_path
    - name: rollout_service
      _target_: rollout_client.adapters.verl.RolloutAgentLoop
      url: http://node-3:8080

The data set needs the columns `environment` and `instance` (in the row, or in its `extra_info`), and a column
`agent_name` with `rollout_service` unless that is the `default_agent_loop`. verl makes an instance for each sample and
calls `run`; it requires no base class.

verl requires a reward for each sample: a rollout without one is run again, and then NoRewardError is raised, which
makes verl's default trainer drop the group. That trainer (`trainer.use_v1`) takes a row for each segment, of at most
`prompt_length + response_length` tokens. The older one takes one row per rollout, with the most tokens to train on: the
rest of a prompt longer than `prompt_length` begins the response, with mask 0, and the response ends after
`response_length`. The extra field `left_out` of a rollout's last row counts the tokens to train on that verl did not
get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from api_schemas.rollouts import Rollout, Stage
from rollout_client.adapters.engines import TrainerEngines
from rollout_client.adapters.samples import RowTooLongError, Sample, count_left_out, only_largest, samples_of
from rollout_client.adapters.submit import RolloutSubmitter

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput


@lru_cache(maxsize=8)
def engines_at(url: str | None, key: str | None, kind: str | None) -> TrainerEngines:
    """Return the engines that all samples of a process share, with the connections to the service."""
    given = {name: value for name, value in (("url", url), ("key", key)) if value is not None}
    return TrainerEngines("verl", RolloutSubmitter.from_environment(**given), kind=kind)


async def engines_of(server_manager: Any) -> tuple[list[str], int | None]:
    """Return the addresses of verl's engines, if any, and the step of their weights.

    The step is an attribute of each server, for which verl has no method.
    """
    balancer = getattr(server_manager, "_load_balancer", None)
    addresses = [] if balancer is None else list(await balancer.get_all_servers.remote())
    if not addresses:
        return [], None
    request_id = uuid4().hex
    address, server = await server_manager._acquire_server(request_id)
    server_manager._release_server(address, request_id)
    step = await server.__ray_call__.remote(lambda actor: actor.global_steps)
    return addresses, step if step is None else int(step)


class RolloutAgentLoop:
    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any = None,
        *,
        url: str | None = None,
        key: str | None = None,
        **_: object,
    ) -> None:
        """Read `url` and `key` from the configuration of the agent loop; the rest is verl's."""
        rollout = trainer_config.config.actor_rollout_ref.rollout
        self.engines = engines_at(url, key, getattr(rollout, "name", None))
        self.server_manager = server_manager
        self.prompt_length, self.response_length = int(rollout.prompt_length), int(rollout.response_length)
        trainer = getattr(trainer_config.config, "trainer", None)
        self.takes_all = bool(getattr(trainer, "use_v1", False))

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run a rollout of the row's task; verl calls this.

        Raises:
            NoRewardError: The rollout has no reward after all attempts.
            RowTooLongError: No token to train on has room.
        """
        submitter = await self.engines.follow(*await engines_of(self.server_manager))
        request = submitter.request(task_row(row), sampling_params, max_tokens=self.response_length, trainer="verl")
        rollout = await submitter.run_scored(request)
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

        rows = rows_of(
            rollout,
            prompt_length=self.prompt_length,
            response_length=self.response_length,
            takes_all=self.takes_all,
        )
        outputs = [
            AgentLoopOutput(
                **output_fields(row, rollout, rows),
                metrics=AgentLoopMetrics(**(metrics(rollout) if row is rows[-1] else {})),
            )
            for row in rows
        ]
        return outputs if self.takes_all else outputs[0]


def rows_of(rollout: Rollout, *, prompt_length: int, response_length: int, takes_all: bool = False) -> list[Sample]:
    """Return a rollout's rows: one for each segment if verl `takes_all`, else the one with the most sampled tokens.

    Raises:
        RowTooLongError: No token to train on has room.
    """
    samples = samples_of(rollout)
    if takes_all:
        most = prompt_length + response_length
        rows = [sample.cut(max(0, most - len(sample.prompt_ids))) for sample in samples]
    else:
        fitting = [sample.with_prompt(prompt_length).cut(response_length) for sample in samples]
        rows = only_largest(fitting)
    if not (rows := [row for row in rows if row.sampled]):
        raise RowTooLongError.of(samples, f"prompt_length ({prompt_length}) or response_length ({response_length})")
    return rows


def task_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = row.get("extra_info")
    return extra if "environment" not in row and isinstance(extra, Mapping) else row


def output_fields(sample: Sample, rollout: Rollout, rows: Sequence[Sample]) -> dict[str, Any]:
    """Return the fields of verl's AgentLoopOutput, without its metrics."""
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
            "left_out": count_left_out(samples_of(rollout), rows) if sample is rows[-1] else 0,
            "reward_extra_info": {},
            "turn_scores": [],
            "tool_rewards": [],
        },
    }


def metrics(rollout: Rollout) -> dict[str, float]:
    """Return seconds under the names of verl's metrics."""
    return {
        "generate_sequences": sum(span.engine_seconds for span in rollout.spans),
        "tool_calls": sum(span.tool_seconds for span in rollout.spans),
        "compute_score": sum(span.seconds for span in rollout.spans if span.stage is Stage.EVALUATE),
    }

"""slime: a custom generate function and the filter that belongs to it. Checked against slime's source of 2026-08-21.

    --custom-generate-function-path rollout_client.adapters.slime.generate
    --dynamic-sampling-filter-path rollout_client.adapters.slime.scored

The service's address is ROLLOUT_URL, its key ROLLOUT_KEY. A row's task is its `metadata` (`--metadata-key`), with
`environment` and `instance`, or its prompt as text (`submit.task_text`).

Guarantees: those of the package. Each segment of a rollout is a sample, and the samples of a rollout share a
`rollout_id`, so they weigh as one. A rollout without a reward is ABORTED, has no reward, is removed from the loss, and
`scored` drops its group; without that filter slime stops, since it would have to make up a reward.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from api_schemas.rollouts import Rollout, StopReason
from rollout_client.adapters.samples import Sample, samples_of
from rollout_client.adapters.submit import RolloutSubmitter, read_sampling

CUT_OFF = {StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL, StopReason.TRUNCATED}


@lru_cache(maxsize=1)
def submitter() -> RolloutSubmitter:
    """Return the submitter that all samples of a process share."""
    return RolloutSubmitter.from_environment()


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any]) -> Any:
    """Run a rollout for slime and return the sample, or several if the rollout has several segments."""
    del args  # the service has the engines
    metadata = sample.metadata or {}
    request = submitter().request(
        metadata if "environment" in metadata else sample.prompt,
        sampling=read_sampling(sampling_params),
        max_tokens=sampling_params.get("max_new_tokens"),
        metadata={"trainer": "slime", "group": sample.group_index},
    )
    rollout = await submitter().run(request)
    samples = samples_of(rollout)
    if rollout.reward is None or not samples:
        return _without_reward(sample, rollout)
    filled = [
        _fill(copy.deepcopy(sample) if number else sample, one, rollout) for number, one in enumerate(samples)
    ]
    return filled[0] if len(filled) == 1 else filled


def scored(args: Any, samples: Sequence[Any], **_: object) -> Any:
    """Keep groups in which every rollout has a reward, and not all the same; slime's dynamic sampling filter."""
    del args
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    rewards = [one.reward for each in samples for one in (each if isinstance(each, list) else [each])]
    if any(reward is None for reward in rewards):
        return DynamicFilterOutput(keep=False, reason="no_reward")
    differ = len({one[0].reward if isinstance(one, list) else one.reward for one in samples}) > 1
    return DynamicFilterOutput(keep=differ, reason=None if differ else "zero_variance")


def _fill(sample: Any, row: Sample, rollout: Rollout) -> Any:
    """Write a row into slime's sample."""
    status = type(sample).Status
    sample.tokens = row.token_ids
    sample.response_length = len(row.response_ids)
    sample.loss_mask = row.response_mask
    sample.rollout_log_probs = row.logprobs
    sample.weight_versions = [str(version) for version in sorted({v for v in row.versions if v >= 0})]
    sample.reward = row.reward
    sample.response = _text(rollout)
    sample.status = status.TRUNCATED if rollout.stop_reason in CUT_OFF else status.COMPLETED
    if sample.index is not None:
        sample.rollout_id = sample.index
    sample.metadata = {
        **(sample.metadata or {}),
        "service_rollout_id": row.rollout_id,
        "segment": row.segment,
    }
    return sample


def _without_reward(sample: Any, rollout: Rollout) -> Any:
    sample.status = type(sample).Status.ABORTED
    sample.reward = None
    sample.remove_sample = True
    cause = rollout.error.code if rollout.error else rollout.state.value
    sample.metadata = {
        **(sample.metadata or {}),
        "service_rollout_id": rollout.rollout_id,
        "no_reward": cause,
    }
    return sample


def _text(rollout: Rollout) -> str:
    """Return the policy's last message, for slime's log; training uses the ids."""
    said = (
        [one.content for one in rollout.trajectory.messages if one.role == "assistant"]
        if rollout.trajectory
        else []
    )
    return said[-1] if said else ""

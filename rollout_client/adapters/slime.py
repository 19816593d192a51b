"""slime: a custom generate function and what belongs to it. Checked against slime's source of 2026-08-21.

    --custom-generate-function-path rollout_client.adapters.slime.generate
    --dynamic-sampling-filter-path rollout_client.adapters.slime.scored
    --custom-reward-post-process-path rollout_client.adapters.slime.normalized

The service's address is ROLLOUT_URL, its key ROLLOUT_KEY. A row's task is its `metadata` (`--metadata-key`), with
`environment` and `instance`, or its prompt as text (`submit.task_text`).

Each segment of a rollout is a sample, and the samples of a rollout share a `rollout_id`, so they weigh as one. A
rollout without a reward is ABORTED, has no reward, is removed from the loss, and `scored` drops its group; without that
filter slime stops, since it would have to make up a reward. `normalized` counts each rollout once in its group, where
slime would normalize over the whole batch. In an evaluation a rollout is one sample. If it has no reward after all
attempts, the log says why, and the reward is NaN, and so is slime's mean: slime relies on the number of samples, and a
zero would be made up.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean, stdev
from typing import Any

import anyio
import httpx

from api_schemas.rollouts import Rollout, RolloutRequest
from rollout_client._connection import find_proxy
from rollout_client.adapters.engines import TrainerEngines
from rollout_client.adapters.samples import CUT_OFF, Sample, last_said, samples_of
from rollout_client.adapters.submit import NoRewardError, RolloutSubmitter

log = logging.getLogger(__name__)

SCALED = ("grpo", "gspo", "cispo")
CENTERED = (*SCALED, "reinforce_plus_plus_baseline")
"""Estimators for which slime divides rewards by their deviation, and those for which it subtracts their mean."""
ROUTER_SECONDS = 10.0
"""How long the router's list of engines is used."""


@lru_cache(maxsize=1)
def engines() -> TrainerEngines:
    """Return the engines that all samples of a process share, with the connections to the service."""
    return TrainerEngines("slime", RolloutSubmitter.from_environment())


@dataclass
class Router:
    url: str
    addresses: Sequence[str] = ()
    asked_at: float = -math.inf
    asking: anyio.Lock = field(default_factory=anyio.Lock)

    async def ask(self) -> Sequence[str]:
        async with self.asking:  # nobody gets the old list while a new one is on its way
            if time.monotonic() - self.asked_at > ROUTER_SECONDS:
                try:
                    self.addresses = await self._addresses()
                except httpx.HTTPError as error:
                    if not self.addresses:
                        raise
                    log.warning("%s does not say its engines, so those of before are used: %r", self.url, error)
                self.asked_at = time.monotonic()
        return self.addresses

    async def _addresses(self) -> Sequence[str]:
        proxy = find_proxy(httpx.URL(self.url))
        async with httpx.AsyncClient(base_url=self.url, proxy=proxy, trust_env=False) as client:
            answer = await client.get("/workers")
            if answer.status_code != httpx.codes.NOT_FOUND:
                return [one["url"] for one in answer.raise_for_status().json()["workers"]]
            # slime's own router, and older ones of SGLang
            answer = await client.get("/list_workers")
            return list(answer.raise_for_status().json()["urls"])


@lru_cache(maxsize=8)
def router_at(host: str, port: int) -> Router:
    return Router(f"http://{f'[{host}]' if ':' in host else host}:{port}")


async def submitter_for(args: Any) -> RolloutSubmitter:
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    return await engines().follow(await router_at(host, int(port)).ask() if host and port else ())


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> list[Any]:
    """Return a sample for each segment; always a list, since slime flattens all alike."""
    metadata = sample.metadata or {}
    submitter = await submitter_for(args)
    row = metadata if "environment" in metadata else sample.prompt
    most = sampling_params.get("max_new_tokens")
    request = submitter.request(row, sampling_params, max_tokens=most, trainer="slime", group=sample.group_index)
    if evaluation:
        return [await _evaluate(submitter, sample, request)]
    rollout = await submitter.run(request)
    samples = samples_of(rollout)
    if rollout.reward is None or not samples:
        return [_without_reward(sample, rollout)]
    return [_fill(copy.deepcopy(sample) if number else sample, one, rollout) for number, one in enumerate(samples)]


async def _evaluate(submitter: RolloutSubmitter, sample: Any, request: RolloutRequest) -> Any:
    """Run a rollout of an evaluation, in which each sample counts as one."""
    try:
        rollout = await submitter.run_scored(request)
    except NoRewardError as error:
        log.warning("the evaluation has no result: %s", error)
        sample.status, sample.reward = type(sample).Status.ABORTED, math.nan
        return sample
    return _fill(sample, samples_of(rollout)[-1], rollout)


def normalized(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return the rewards as they are, and as slime normalizes them within a group, each rollout counting once."""
    raw = [sample.get_reward_value(args) for sample in samples]
    if not (args.advantage_estimator in CENTERED and args.rewards_normalization):
        return raw, raw
    groups: dict[Any, dict[Any, float]] = defaultdict(dict)
    for sample, reward in zip(samples, raw, strict=True):
        groups[sample.group_index][_rollout_of(sample)] = reward
    is_scaled = args.advantage_estimator in SCALED and args.grpo_std_normalization
    rewards = []
    for sample, reward in zip(samples, raw, strict=True):
        group = list(groups[sample.group_index].values())
        centered = reward - fmean(group)
        rewards.append(centered / (stdev(group) + 1e-6) if is_scaled and len(group) > 1 else centered)
    return raw, rewards


def _rollout_of(sample: Any) -> Any:
    return sample.index if sample.rollout_id is None else sample.rollout_id


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
    status = type(sample).Status
    sample.tokens = row.token_ids
    sample.response_length = len(row.response_ids)
    sample.loss_mask = row.response_mask
    sample.rollout_log_probs = row.logprobs
    sample.weight_versions = [str(version) for version in sorted({v for v in row.versions if v >= 0})]
    sample.reward = row.reward
    sample.response = last_said(rollout)
    sample.status = status.TRUNCATED if rollout.stop_reason in CUT_OFF else status.COMPLETED
    if sample.index is not None:
        sample.rollout_id = sample.index
    return _note(sample, rollout, segment=row.segment)


def _without_reward(sample: Any, rollout: Rollout) -> Any:
    sample.status = type(sample).Status.ABORTED
    sample.reward = None
    sample.remove_sample = True
    cause = rollout.error.code if rollout.error else rollout.state.value
    return _note(sample, rollout, no_reward=cause)


def _note(sample: Any, rollout: Rollout, **facts: object) -> Any:
    sample.metadata = {**(sample.metadata or {}), "service_rollout_id": rollout.rollout_id, **facts}
    return sample

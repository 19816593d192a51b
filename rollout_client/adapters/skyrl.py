"""SkyRL: a generator. Checked against the interface of SkyRL 0.4.0 and its source of 2026-08-21.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return generator(inference_engine_client, step_wise=cfg.generator.step_wise_trajectories)

Each row's task is in its `env_extras` (`environment`, `instance`), or in its prompt as text (`submit.task_text`).

With `step_wise`, each segment is a row and the last one has the rollout's reward. Without it, a rollout is its row with
the most tokens to train on, and `rollouts/left_out` in the metrics counts the tokens left out. SkyRL requires a reward
for each row: a rollout without one is run again, and then NoRewardError is raised.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from api_schemas.rollouts import Rollout, RolloutRequest
from rollout_client.adapters.engines import TrainerEngines
from rollout_client.adapters.samples import CUT_OFF, Sample, count_left_out, only_largest, samples_of
from rollout_client.adapters.submit import RolloutSubmitter, run_in_order


def generator(engine_client: Any = None, *, submitter: RolloutSubmitter | None = None, step_wise: bool = False) -> Any:
    """Return a generator that is a subclass of SkyRL's own; its rollouts use the engines of `engine_client`, if any."""
    from skyrl.train.generators.base import GeneratorInterface

    class RolloutGenerator(BatchGenerator, GeneratorInterface):  # type: ignore[misc]
        pass

    return RolloutGenerator(submitter or RolloutSubmitter.from_environment(), engine_client, step_wise=step_wise)


class BatchGenerator:
    """Runs the rollouts of a batch together, at most `concurrency` at once."""

    def __init__(self, submitter: RolloutSubmitter, engine_client: Any = None, *, step_wise: bool = False) -> None:
        self.engines = TrainerEngines("skyrl", submitter)
        self.engine_client = engine_client
        self.step_wise = step_wise

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        addresses = getattr(self.engine_client, "server_urls", None) or ()
        submitter = await self.engines.follow(addresses, int(self.engine_client.weight_version) if addresses else None)

        async def timed(request: RolloutRequest) -> tuple[Rollout, float]:
            start = time.monotonic()
            return await submitter.run_scored(request), time.monotonic() - start

        calls = [partial(timed, request) for request in _requests(submitter, input_batch)]
        ended = await run_in_order(calls, concurrency=submitter.concurrency)
        rollouts, seconds = [rollout for rollout, _ in ended], [each for _, each in ended]
        return columns(rollouts, input_batch.get("trajectory_ids"), seconds, step_wise=self.step_wise)


def _requests(submitter: RolloutSubmitter, batch: Mapping[str, Any]) -> Sequence[RolloutRequest]:
    extras = batch.get("env_extras") or [{}] * len(batch["prompts"])
    params = batch.get("sampling_params") or {}
    limit = params.get("max_generate_length") or params.get("max_tokens")
    return [
        submitter.request(extra if "environment" in extra else prompt, params, max_tokens=limit, trainer="skyrl")
        for prompt, extra in zip(batch["prompts"], extras, strict=True)
    ]


def columns(
    rollouts: Sequence[Rollout], ids: Sequence[Any] | None, seconds: Sequence[float], *, step_wise: bool
) -> dict[str, Any]:
    """Return SkyRL's GeneratorOutput for rollouts that took these `seconds`."""
    rows: list[tuple[int, Rollout, Sample]] = []
    left_out = 0
    for number, rollout in enumerate(rollouts):
        samples = samples_of(rollout)
        chosen = samples if step_wise else only_largest(samples)
        left_out += count_left_out(samples, chosen)
        rows += [(number, rollout, sample) for sample in chosen]
    output: dict[str, Any] = {
        "prompt_token_ids": [sample.prompt_ids for _, _, sample in rows],
        "response_ids": [sample.response_ids for _, _, sample in rows],
        "rewards": [_rewards(sample, step_wise) for _, _, sample in rows],
        "loss_masks": [sample.response_mask for _, _, sample in rows],
        "stop_reasons": ["length" if rollout.stop_reason in CUT_OFF else "stop" for _, rollout, _ in rows],
        "rollout_metrics": {
            "rollouts/turns": sum(rollout.usage.turns for rollout in rollouts) / max(1, len(rollouts)),
            "rollouts/left_out": left_out / max(1, len(rollouts)),
        },
        "rollout_logprobs": [sample.logprobs for _, _, sample in rows],
        "trajectory_ids": None if ids is None else [ids[number] for number, _, _ in rows],
        "trajectory_generation_times": [seconds[number] for number, _, _ in rows],
        "rollout_expert_indices": None,
        "is_last_step": [sample.last for _, _, sample in rows] if step_wise else None,
    }
    return output


def _rewards(sample: Sample, step_wise: bool) -> float | list[float]:
    """Return a number for the row, or, step by step, for each token, with the reward on the rollout's last."""
    reward = sample.reward if sample.reward is not None else float("nan")
    if not step_wise:
        return reward
    return [0.0] * (len(sample.response_ids) - 1) + [reward if sample.last else 0.0]

"""TRL: `rollout_func` of GRPOTrainer. Tested with TRL 1.16.

    hook = RolloutHook(RolloutSubmitter.from_environment(), weights="/shared/weights")
    trainer = GRPOTrainer(
        model=..., train_dataset=Dataset.from_list(rows(tasks)), rollout_func=hook, reward_funcs=service_reward, ...
    )

Each prompt that TRL hands over is one rollout, so TRL's groups are groups of rollouts; before TRL samples with new
weights, the engines have them; `env_mask` is 0 on tools' results. A rollout without a reward has none for TRL either
(`None`, which TRL leaves out of the group's mean), and nothing of it is trained on. TRL takes one row per rollout: if
there are several segments, it gets the one with the most sampled tokens. Its log has the number of sampled tokens that
a rollout lost this way as `rollouts/left_out`, with `rollouts/failed` and `rollouts/turns`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from api_schemas.inference import PoolOutcome
from api_schemas.rollouts import Rollout
from api_schemas.tasks import Task
from rollout_client.adapters.samples import count_left_out, only_largest, samples_of
from rollout_client.adapters.submit import RolloutSubmitter, task_text
from rollout_client.client import RolloutClient
from rollout_client.errors import WeightsError

SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Sampling fields of GRPOConfig, which have the same names in the service."""


def rows(tasks: Iterable[Task]) -> list[dict[str, str]]:
    """Return rows of a data set for TRL. Each row's prompt is its task as text, since TRL's hook gets only prompts."""
    return [{"prompt": task_text(task)} for task in tasks]


def service_reward(
    *,
    rollout_reward: Sequence[float | None],
    rollout_turns: Sequence[int],
    rollout_left_out: Sequence[int],
    log_metric: Callable[[str, float], None],
    **_: object,
) -> list[float | None]:
    """Return the environment's rewards, which came with the rollouts, and log how the rollouts went."""
    count = len(rollout_reward)
    log_metric("rollouts/failed", sum(reward is None for reward in rollout_reward) / count)
    log_metric("rollouts/turns", sum(rollout_turns) / count)
    log_metric("rollouts/left_out", sum(rollout_left_out) / count)
    return list(rollout_reward)


class RolloutHook:
    """A `rollout_func`: runs rollouts, and keeps the engines' weights up to date with the trainer's."""

    def __init__(self, submitter: RolloutSubmitter, *, weights: str | Path | None) -> None:
        """`weights` is a folder that the engines can read; None leaves their weights alone."""
        self.submitter = submitter
        self.weights = None if weights is None else WeightsFolder(submitter, Path(weights))
        self.__name__ = "rollout_service"

    def __call__(self, prompts: Sequence[object], trainer: Any) -> dict[str, list[Any]]:
        """Return a completion for each of TRL's prompts, which TRL has already repeated for each group."""
        if self.weights is not None:
            keep_up(self.weights, trainer)
        params = {name: getattr(trainer.args, name, None) for name in SAMPLING}
        step, most = int(trainer.state.global_step), trainer.args.max_completion_length
        requests = [
            self.submitter.request(prompt, params, max_tokens=most, trainer="trl", step=step) for prompt in prompts
        ]
        rollouts = self.submitter.run_all_blocking(requests)
        return columns(rollouts, trainer.processing_class.eos_token_id)


def columns(rollouts: Sequence[Rollout], end: int) -> dict[str, list[Any]]:
    """Return rollouts in the form of TRL's hook; one that must not be trained on is a masked `end` without a reward."""
    nothing = {
        "prompt_ids": [end],
        "completion_ids": [end],
        "logprobs": [0.0],
        "env_mask": [0],
        "rollout_reward": None,
    }
    rows = []
    for rollout in rollouts:
        samples = samples_of(rollout)
        row: dict[str, Any] = dict(nothing)
        for sample in only_largest(samples) if rollout.reward is not None else ():
            row = {
                "prompt_ids": sample.prompt_ids,
                "completion_ids": sample.response_ids,
                "logprobs": sample.logprobs,
                "env_mask": sample.response_mask,
                "rollout_reward": sample.reward,
            }
        row["rollout_id"] = rollout.rollout_id
        row["rollout_turns"] = rollout.usage.turns
        row["rollout_left_out"] = count_left_out(samples, only_largest(samples))
        rows.append(row)
    return {name: [row[name] for row in rows] for name in rows[0]}


log = logging.getLogger(__name__)


class WeightsFolder:
    """Gives engines a trainer's weights through `folder`, which they must be able to read, and `POST /v1/weights`.

    After `push`, the engines serve the saved weights, under a higher version than any before. The folder that they
    serve from is kept, so an engine that comes back finds it; the previous folder is removed.
    """

    def __init__(self, submitter: RolloutSubmitter, folder: Path) -> None:
        self.submitter = submitter
        self.folder = folder.absolute()
        self.step: int | None = None
        """The step whose weights the engines serve; None before the first push."""
        self.version: int | None = None
        self._base = 0

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def push(self, step: int, save: Callable[[str], None]) -> int:
        """Save the weights of a step, load them into every engine of the pool, and return their version.

        If only some engines loaded them, that is logged and training continues: the others are out of service until
        they have them.

        Raises:
            WeightsError: No engine loaded them.
            ClientError: The service cannot be reached or refuses.
        """
        path = self.path(step)
        path.mkdir(parents=True, exist_ok=True)
        save(str(path))
        outcome: PoolOutcome = self.submitter.blocking(lambda client: self._update(client, step))
        if self.step is not None and self.step != step:
            shutil.rmtree(self.path(self.step), ignore_errors=True)
        self.step, self.version = step, outcome.version
        return self._base + step

    async def _update(self, client: RolloutClient, step: int) -> PoolOutcome:
        if self.step is None:  # continue the numbers of earlier trainers of this service
            served = [one.weight_version for one in await client.backends() if one.pool == self.submitter.pool]
            self._base = max(served, default=0) + 1
        try:
            return await client.update_weights(str(self.path(step)), self._base + step, pool=self.submitter.pool)
        except WeightsError as error:
            if not error.outcome.changed:
                raise
            log.warning("%s", error)
            return error.outcome


def keep_up(weights: WeightsFolder, trainer: Any) -> None:
    """Push a Hugging Face trainer's weights after a step: all processes save, one calls the service."""
    step = int(trainer.state.global_step)
    if weights.step == step:
        return
    if trainer.accelerator.is_main_process:
        weights.push(step, trainer.save_model)
    else:
        trainer.save_model(str(weights.path(step)))
        weights.step = step
    trainer.accelerator.wait_for_everyone()

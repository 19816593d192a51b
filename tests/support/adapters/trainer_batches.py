"""Batches for the trainer's tests: random rollouts, with the log-probabilities of the embedded engine's own model."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.runs import Batch, Group, GroupSample
from api_schemas.tasks import Task
from rollout_service.engines.kinds.embedded.model import KVStore, Qwen3

NOW = datetime(2025, 1, 1, tzinfo=UTC)
PROMPT = 4


def write_batch(
    file: Path, model: Path, *, groups: int = 2, samples: int = 4, tokens: int = 12, version: int = 0
) -> Path:
    """Write a batch of random ids with rewards 0 and 1 in each group, as the service would lease it."""
    random, engine = np.random.default_rng(7), Qwen3(model)
    count = groups * samples
    prompts = np.repeat(random.integers(3, engine.config.vocab_size, (groups, PROMPT)), samples, axis=0)
    ids = np.hstack([prompts, random.integers(3, engine.config.vocab_size, (count, tokens - PROMPT))])
    mask = np.tile(np.arange(tokens) >= PROMPT, (count, 1))
    logprobs = np.zeros((count, tokens))
    for at in range(1, tokens):
        logits = _after(engine, ids[:, :at])
        logprobs[:, at] = logits[np.arange(count), ids[:, at]] - np.log(np.exp(logits).sum(-1))
    rewards = np.tile(np.arange(samples) % 2, groups).astype("<f4")
    tensors = {
        "group_offsets": np.arange(groups + 1, dtype="<i8") * samples,
        "sample_offsets": np.arange(count + 1, dtype="<i8"),
        "segment_offsets": np.arange(count + 1, dtype="<i8") * tokens,
        "token_ids": ids.ravel().astype("<i4"),
        "loss_mask": mask.ravel().astype("u1"),
        "logprobs": np.where(mask, logprobs, 0.0).ravel().astype("<f4"),
        "versions": np.where(mask, version, -1).ravel().astype("<i4"),
        "turn_ids": np.where(mask, 0, -1).ravel().astype("<i4"),
        "rewards": rewards,
        "advantages": 2 * rewards - 1,
        "usable": np.ones(count, "u1"),
    }
    batch = Batch(
        batch_id="a.b0",
        run_id="a",
        number=0,
        groups=[_group(number, samples) for number in range(groups)],
        delivery=1,
        lease_until=NOW,
        version=version,
        oldest_version=version,
        newest_version=version,
        dropped={"all_failed": 1, "zero_variance": 1},
    )
    save_file(tensors, file, metadata={"batch": batch.model_dump_json()})
    return file


def _after(engine: Qwen3, ids: np.ndarray) -> np.ndarray:
    """Return the logits after the last of these ids."""
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return engine.forward(ids, positions, KVStore(engine.config, len(ids)), 0).astype(np.float64)


def _group(number: int, samples: int) -> Group:
    task = Task(environment="calc")
    rollouts = [
        Rollout(
            rollout_id=f"a.{number}.{sample}",
            state=RolloutState.COMPLETED,
            task=task,
            pool="policy",
            created_at=NOW,
        )
        for sample in range(samples)
    ]
    return Group(
        group_id=f"a.{number}",
        number=number,
        epoch=0,
        task=task,
        samples=[
            GroupSample(sample=sample, rollout=rollout, usable=True, reward=float(sample % 2))
            for sample, rollout in enumerate(rollouts)
        ],
        usable=samples,
        reward_mean=0.5,
        reward_std=0.5,
        oldest_version=0,
        newest_version=0,
    )

"""Shuffled rewards are a batch's own, say nothing of the samples, and give the advantages that the service would."""

from pathlib import Path

import numpy as np
import pytest
from trainer.control import shuffled

from api_schemas.runs import Advantages
from rollout_client.arrays import BatchArrays
from rollout_service.groups.statistics import group_normalized, leave_one_out
from rollout_service.testing import Shape, write_random_checkpoint
from tests.support.adapters.trainer_batches import write_batch

SHAPE = Shape(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate=16, vocab=300, context=64)
GROUPS, SAMPLES = 4, 8
UNUSABLE, UNSCORED = 3, 12


@pytest.fixture(scope="module")
def arrays(tmp_path_factory) -> BatchArrays:
    """A batch whose first two groups failed and whose others did not, with a sample that failed and one left out."""
    folder = tmp_path_factory.mktemp("batch")
    model = write_random_checkpoint(folder / "model", SHAPE)
    batch = BatchArrays.from_file(write_batch(Path(folder / "batch"), model, groups=GROUPS, samples=SAMPLES))
    rewards = np.repeat([0.0, 0.25, 0.75, 1.0], SAMPLES).astype("<f4")
    usable = np.ones(GROUPS * SAMPLES, "u1")
    usable[[UNUSABLE, UNSCORED]] = 0
    rewards[UNSCORED] = np.nan
    return BatchArrays(batch.batch, {**batch.tensors, "rewards": rewards, "usable": usable})


def scored(arrays: BatchArrays) -> np.ndarray:
    return np.delete(arrays.tensors["rewards"], [UNUSABLE, UNSCORED])


def test_the_rewards_of_usable_samples_change_places_across_groups(arrays):
    found = shuffled(arrays, 1)
    assert sorted(scored(found)) == sorted(scored(arrays))
    assert np.isnan(found.tensors["rewards"][[UNUSABLE, UNSCORED]]).all()
    assert np.isnan(found.tensors["advantages"][[UNUSABLE, UNSCORED]]).all()
    spread = [np.nanstd(group) for group in found.tensors["rewards"].reshape(GROUPS, SAMPLES)]
    assert min(spread) > 0.0  # within each group of the batch, all samples had the same reward
    assert found.tensors["token_ids"] is arrays.tensors["token_ids"]


def test_advantages_are_those_of_the_service(arrays):
    found = shuffled(arrays, 1).tensors
    for number in range(GROUPS):
        part = slice(number * SAMPLES, (number + 1) * SAMPLES)
        rewards = [None if np.isnan(each) else float(each) for each in found["rewards"][part]]
        expected = [np.nan if each is None else each for each in group_normalized(rewards)]
        np.testing.assert_allclose(found["advantages"][part], expected, rtol=1e-5)


def test_advantages_without_the_deviation_are_those_of_the_service(arrays):
    found = shuffled(arrays, 1, Advantages.LEAVE_ONE_OUT).tensors
    for number in range(GROUPS):
        part = slice(number * SAMPLES, (number + 1) * SAMPLES)
        rewards = [None if np.isnan(each) else float(each) for each in found["rewards"][part]]
        expected = [np.nan if each is None else each for each in leave_one_out(rewards)]
        np.testing.assert_allclose(found["advantages"][part], expected, atol=1e-6)


def test_a_group_without_differences_has_no_advantages(arrays):
    same = np.where(np.isnan(arrays.tensors["rewards"]), np.nan, 1.0).astype("<f4")
    found = shuffled(BatchArrays(arrays.batch, {**arrays.tensors, "rewards": same}), 1)
    assert set(np.delete(found.tensors["advantages"], [UNUSABLE, UNSCORED])) == {0.0}


def test_the_seed_and_the_batch_decide(arrays):
    next_batch = BatchArrays(arrays.batch.model_copy(update={"number": 1}), arrays.tensors)
    first, again, *others = (
        shuffled(each, seed).tensors["rewards"]
        for each, seed in ((arrays, 1), (arrays, 1), (arrays, 2), (next_batch, 1))
    )
    np.testing.assert_array_equal(first, again)
    assert not any(np.array_equal(first, other, equal_nan=True) for other in others)


def test_shuffled_rewards_do_not_depend_on_the_samples(arrays):
    correlations = [np.corrcoef(scored(arrays), scored(shuffled(arrays, seed)))[0, 1] for seed in range(200)]
    assert abs(np.mean(correlations)) < 0.05  # each varies by 0.18 around 0, so their mean varies by 0.013

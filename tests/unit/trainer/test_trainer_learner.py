"""The trainer's steps, checkpoints and resumption are exact, on a random model of a few thousand parameters."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer.checkpoint import STATE, Checkpoints, load_state, weights_of
from trainer.learner import Learner, Recipe
from trainer.policy import Sample, sampled_logprobs, samples_of

from rollout_client.arrays import BatchArrays
from rollout_service.engines.kinds.embedded.weights import read_tensors
from rollout_service.testing import Shape, write_random_checkpoint
from tests.support.adapters.trainer_batches import PROMPT, write_batch

pytestmark = [pytest.mark.slow, pytest.mark.torch]

SHAPE = Shape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=48, vocab=300, context=600)
RECIPE = Recipe(learning_rate=1e-2, warm_up=1, epochs=1, updates=1, portion=3)


torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model") / "base", SHAPE)


@pytest.fixture(scope="module")
def arrays(base, tmp_path_factory) -> BatchArrays:
    return BatchArrays.from_file(write_batch(tmp_path_factory.mktemp("batch") / "batch", base))


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights_of(learner.model).items()}


def logprobs_of(learner: Learner, samples: list[Sample]) -> torch.Tensor:
    with torch.no_grad():
        return sampled_logprobs(learner.model, samples, 1.0)[0]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.allclose(left[name], right[name], atol=1e-5) for name in left)


def test_recomputed_logprobs_are_the_engines(base, arrays):
    samples = samples_of(arrays)
    with torch.no_grad():
        found, entropies = sampled_logprobs(Learner(base, RECIPE).model, samples, 1.0)
    np.testing.assert_allclose(found, np.concatenate([each.behavior for each in samples]), atol=1e-4)
    assert found.shape == entropies.shape
    assert 0 < entropies.min() <= entropies.max() <= np.log(SHAPE.vocab) + 1e-4


def test_samples_of_different_lengths_and_prompts_do_not_touch_each_other(base, arrays):
    samples = samples_of(arrays)
    cut = replace(samples[0], token_ids=samples[0].token_ids[:7], mask=samples[0].mask[:7])
    learner = Learner(base, RECIPE)
    together = logprobs_of(learner, [cut, samples[-1]])
    alone = torch.cat([logprobs_of(learner, [each]) for each in (cut, samples[-1])])
    assert len(together) == 7 - PROMPT + len(samples[-1].behavior)
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


def test_masked_and_average_samples_are_not_trained_on(arrays):
    tensors = dict(arrays.tensors)
    tensors["usable"] = np.array([0, 1, 1, 1, 1, 1, 1, 1], "u1")
    tensors["advantages"] = np.array([1, np.nan, 0, 1, -1, 1, -1, 1], "<f4")
    assert [set(each.advantages) for each in samples_of(BatchArrays(arrays.batch, tensors))] == [
        {1},
        {-1},
        {1},
        {-1},
        {1},
    ]


def test_a_step_makes_good_samples_likelier_and_bad_ones_less(base, arrays):
    learner, samples = Learner(base, RECIPE), samples_of(arrays)
    before = torch.cat([logprobs_of(learner, [each]) for each in samples])
    watched = learner.step(samples)
    after = torch.cat([logprobs_of(learner, [each]) for each in samples])
    advantages = np.concatenate([each.advantages for each in samples])
    assert float(((after - before).numpy() * advantages).mean()) > 0.01
    assert learner.steps == 1
    assert watched["tokens"] == len(advantages)
    assert watched["logprob_gap_max"] < 1e-4
    assert watched["staleness"] == watched["clipped"] == watched["capped"] == 0.0


def test_the_size_of_portions_changes_nothing(base, arrays):
    samples = samples_of(arrays)
    norms = [Learner(base, replace(RECIPE, portion=portion)).step(samples)["gradient_norm"] for portion in (2, 8)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_several_updates_keep_the_proximal_policy_of_the_beginning(base, arrays):
    learner = Learner(base, replace(RECIPE, updates=4, learning_rate=0.1))
    watched = learner.step(samples_of(arrays))
    assert watched["clipped"] > 0.0  # against weights that moved on, although the engine used the first ones
    assert watched["logprob_gap_max"] < 1e-4


def test_without_discouragement_only_good_samples_are_learned_from(base, arrays):
    samples = samples_of(arrays)
    good = [each for each in samples if each.advantages.max() > 0]
    quiet = replace(RECIPE, discouragement=0.0)
    whole = Learner(base, quiet).step(samples)["gradient_norm"]
    alone = Learner(base, quiet).step(good)["gradient_norm"]
    assert whole == pytest.approx(alone * len(good) / len(samples), rel=1e-3)  # the same sum, over all tokens


def test_a_stale_batch_is_seen_as_one(base, arrays):
    learner = Learner(base, RECIPE)
    learner.steps = 3
    assert learner.step(samples_of(arrays))["staleness_max"] == 3.0


def test_a_killed_trainer_resumes_with_the_same_results(base, arrays, tmp_path):
    samples, recipe = samples_of(arrays), replace(RECIPE, updates=2, epochs=2)
    whole = Learner(base, recipe, seed=5)
    whole.step(samples)
    saved = Checkpoints(tmp_path, base).save(whole.model, whole.state() | {"batch": "a.b0"})
    whole.step(samples)

    again = Checkpoints(tmp_path, base)
    assert again.latest() == saved
    state = load_state(saved)
    assert (state["batch"], state["steps"]) == ("a.b0", 1)
    resumed = Learner(saved.folder, recipe, seed=99)
    resumed.restore(state)
    resumed.step(samples)
    assert resumed.steps == whole.steps == 2
    assert same(weights(resumed), weights(whole))


def test_a_checkpoint_is_what_an_engine_loads(base, tmp_path):
    learner = Learner(base, RECIPE)
    saved = Checkpoints(tmp_path, base).save(learner.model, learner.state())
    tensors, first = read_tensors(saved.folder), read_tensors(base)
    assert tensors.keys() == first.keys()
    assert all(np.array_equal(tensors[name], first[name]) for name in first)


def test_an_unfinished_checkpoint_is_ignored_and_old_ones_are_deleted(base, tmp_path):
    learner, saved = Learner(base, RECIPE), Checkpoints(tmp_path, base)
    for steps in range(1, 6):
        learner.steps = steps
        saved.save(learner.model, learner.state())
    (tmp_path / ".writing-6").mkdir()
    (tmp_path / ".writing-6" / "model.safetensors").write_bytes(b"half of it")
    again = Checkpoints(tmp_path, base)
    assert again.latest().steps == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4", "step-5"]


def test_a_checkpoint_that_would_run_code_is_not_read(base, tmp_path):
    learner = Learner(base, RECIPE)
    saved = Checkpoints(tmp_path, base).save(learner.model, learner.state())
    torch.save(Orders(str(tmp_path / "done")), saved.folder / STATE)
    with pytest.raises(pickle.UnpicklingError):
        load_state(saved)
    assert not (tmp_path / "done").exists()


class Orders:
    """An object whose pickle has its reader create a folder."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (self._path,)


def test_the_batch_in_hand_is_known_to_the_next_process(base, tmp_path):
    saved = Checkpoints(tmp_path, base)
    assert saved.held() is None
    saved.hold("train.b7")
    assert Checkpoints(tmp_path, base).held() == "train.b7"


def test_the_learning_rate_rises_then_falls_and_stays():
    recipe = Recipe(learning_rate=1.0, warm_up=2, horizon=10, last=0.1)
    assert [round(recipe.learning_rate_of(step), 3) for step in (1, 5, 10, 99)] == [0.5, 0.55, 0.1, 0.1]
    assert max(recipe.learning_rate_of(step) for step in range(1, 99)) < 1.0

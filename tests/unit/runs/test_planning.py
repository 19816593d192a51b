"""The rollout requests of a run's groups: each sample has a seed of its own, and always the same one."""

import pytest

from rollout_service.runs.planning import sample_seed

EPOCHS = {number: [sample_seed(7, number, sample) for sample in range(8)] for number in range(100)}


def test_no_two_samples_of_a_run_share_a_seed_and_the_same_run_has_the_same_ones():
    seeds = [seed for group in EPOCHS.values() for seed in group]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds), "engines may keep seeds in 32 bits"
    assert seeds[:2] == [1_664_739_778, 1_664_739_779], "in every release"


@pytest.mark.parametrize("seed", [-(2**62), 0, 2**62])
def test_the_largest_group_has_distinct_seeds(seed):
    assert len({sample_seed(seed, 2**40, sample) for sample in range(1_024)}) == 1_024


def test_a_run_with_the_next_seed_repeats_no_sample():
    other = {sample_seed(8, number, sample) for number in range(100) for sample in range(8)}
    assert other.isdisjoint(seed for group in EPOCHS.values() for seed in group)

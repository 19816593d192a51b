"""Sampling options mean the same as in SGLang, and each draw depends only on its seed and position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engines.kinds.embedded.sampler import SamplerSettings, sample

VOCAB = 20
LOGITS = np.random.default_rng(0).standard_normal((1, VOCAB)).astype(np.float32) * 3


def draws(settings, count=3000):
    """Return tokens drawn from the same logits at many positions."""
    logits = np.repeat(LOGITS, count, axis=0)
    return sample(logits, [settings] * count, list(range(count)))[0]


def probabilities(temperature):
    scaled = np.exp(LOGITS[0].astype(np.float64) / temperature)
    return scaled / scaled.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_they_should(temperature):
    counts = np.bincount(draws(SamplerSettings(temperature=temperature, seed=3)), minlength=VOCAB)
    expected = probabilities(temperature)
    deviations = np.abs(counts / 3000 - expected)
    assert (deviations < 5 * np.sqrt(expected / 3000) + 1e-3).all()


@pytest.mark.parametrize("settings", [SamplerSettings(temperature=0.0), SamplerSettings(temperature=2.0, top_k=1)])
def test_greedy_takes_the_likeliest_with_its_logprob_at_temperature_one(settings):
    tokens, logprobs = sample(LOGITS, [settings], [7])
    assert tokens[0] == LOGITS[0].argmax()
    assert logprobs[0] == pytest.approx(np.log(probabilities(1.0).max()))


@pytest.mark.parametrize(
    "settings",
    [
        SamplerSettings(temperature=0.7, seed=1),
        SamplerSettings(temperature=0.7, seed=1, top_k=5),
        SamplerSettings(temperature=0.7, seed=1, top_p=0.8),
        SamplerSettings(temperature=0.7, seed=1, min_p=0.05),
    ],
)
def test_logprobs_are_temperature_scaled_and_not_renormalized(settings):
    tokens, logprobs = sample(LOGITS, [settings], [3])
    assert logprobs[0] == pytest.approx(np.log(probabilities(0.7)[tokens[0]]))


def test_top_k_draws_from_the_k_likeliest():
    allowed = set(np.argsort(-LOGITS[0])[:3])
    assert set(draws(SamplerSettings(temperature=5.0, top_k=3))) == allowed


def test_top_p_draws_from_the_smallest_set_that_reaches_it():
    ranked = np.sort(probabilities(1.0))[::-1]
    size = int((np.cumsum(ranked) - ranked <= 0.6).sum())
    assert set(draws(SamplerSettings(top_p=0.6))) == set(np.argsort(-LOGITS[0])[:size])


def test_min_p_draws_tokens_likely_enough_compared_to_the_likeliest():
    ratio = probabilities(1.0) / probabilities(1.0).max()
    assert set(draws(SamplerSettings(min_p=0.2))) == set(np.flatnonzero(ratio >= 0.2))


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 100_000),
    neighbors=st.integers(0, 6),
    row=st.integers(0, 6),
)
def test_a_draw_does_not_depend_on_its_neighbors(seed, position, neighbors, row):
    settings = SamplerSettings(seed=seed, top_p=0.9)
    alone, alone_logprob = sample(LOGITS, [settings], [position])
    row = min(row, neighbors)
    others = [SamplerSettings(seed=i, temperature=0.1 + i) for i in range(neighbors + 1)]
    others[row] = settings
    positions = [i * 3 for i in range(neighbors + 1)]
    positions[row] = position
    together, together_logprobs = sample(np.repeat(LOGITS, neighbors + 1, axis=0), others, positions)
    assert together[row] == alone[0]
    assert together_logprobs[row] == alone_logprob[0]


def test_seeds_and_positions_make_different_draws():
    assert len(set(draws(SamplerSettings(temperature=5.0, seed=1)))) > 5
    by_seed = [sample(LOGITS, [SamplerSettings(temperature=5.0, seed=i)], [0])[0][0] for i in range(50)]
    assert len(set(by_seed)) > 5


def test_impossible_tokens_are_never_drawn():
    logits = np.full((1, 4), -np.inf, np.float32)
    logits[0, 2] = 0.0
    for position in range(200):
        assert sample(logits, [SamplerSettings(seed=position)], [position])[0][0] == 2

"""The trainer's loss is the formula of the papers, token by token, with a gradient only where it belongs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer.loss import Clip, dapo_loss

pytestmark = pytest.mark.torch

LOGPROB = st.floats(-6.0, 0.0)
TOKEN = st.tuples(LOGPROB, LOGPROB, LOGPROB, st.floats(-2.0, 2.0))
CLIPS = st.builds(Clip, st.floats(0.05, 0.5), st.floats(0.05, 0.9), st.floats(1.0, 5.0))


def plain(tokens: list[tuple[float, float, float, float]], divisor: int, clip: Clip) -> float:
    """Return the objective, computed as the formula is written."""
    total = 0.0
    for current, proximal, behavior, advantage in tokens:
        ratio = math.exp(current - proximal)
        clipped = max(1 - clip.low, min(1 + clip.high, ratio))
        weight = min(math.exp(proximal - behavior), clip.weight)
        total += weight * min(ratio * advantage, clipped * advantage)
    return -total / divisor


def loss_of(tokens: list[tuple[float, float, float, float]], divisor: int, clip: Clip, current=None):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
    return dapo_loss(columns[0] if current is None else current, *columns[1:], divisor, clip)


@given(st.lists(TOKEN, min_size=1, max_size=20), st.integers(1, 50), CLIPS)
def test_the_loss_is_the_plain_formula(tokens, divisor, clip):
    assert loss_of(tokens, divisor, clip).value.item() == pytest.approx(
        plain(tokens, divisor, clip), rel=1e-9, abs=1e-12
    )


@given(st.lists(TOKEN, min_size=2, max_size=20), CLIPS, st.data())
def test_portions_add_up_to_the_whole(tokens, clip, data):
    at = data.draw(st.integers(1, len(tokens) - 1))
    whole = loss_of(tokens, len(tokens), clip).value
    parts = [loss_of(part, len(tokens), clip).value for part in (tokens[:at], tokens[at:])]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-9, abs=1e-12)


@given(st.lists(TOKEN, min_size=1, max_size=20), CLIPS)
def test_on_policy_it_is_the_plain_policy_gradient(tokens, clip):
    """With all three policies the same, a token's gradient is its advantage over the number of tokens."""
    tokens = [(start, start, start, advantage) for _, start, _, advantage in tokens]
    current = torch.tensor([each[0] for each in tokens], dtype=torch.float64, requires_grad=True)
    loss_of(tokens, len(tokens), clip, current).value.backward()
    expected = torch.tensor([-each[3] / len(tokens) for each in tokens], dtype=torch.float64)
    torch.testing.assert_close(current.grad, expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "free"),
    [
        (1.25, 1.0, True),  # below 1 + high: an unlikely token may still grow
        (1.30, 1.0, False),
        (1.30, -1.0, True),
        (0.75, -1.0, False),
        (0.75, 1.0, True),
    ],
)
def test_the_clip_takes_the_gradient_only_beyond_its_side(ratio, advantage, free):
    current = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    loss = loss_of([(0.0, -1.0, -1.0, advantage)], 1, Clip(), current)
    loss.value.backward()
    assert (current.grad.item() != 0.0) is free
    assert loss.clipped == float(not free)


def test_the_weight_is_capped_and_has_no_gradient():
    proximal = torch.tensor([-1.0, -1.0], requires_grad=True)
    behavior = torch.tensor([-3.0, -1.5])
    loss = dapo_loss(proximal.detach(), proximal, behavior, torch.ones(2), 1, Clip(weight=2.0))
    assert loss.capped == 0.5
    assert loss.value.item() == pytest.approx(-(2.0 + math.exp(0.5)))
    (gradient,) = torch.autograd.grad(loss.value, proximal)
    weights = torch.tensor([2.0, math.exp(0.5)])  # from the ratio alone; the weight would add as much again
    torch.testing.assert_close(gradient, weights)

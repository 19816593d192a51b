"""Rewards of verifiers: read strictly, combined as Harbor does, and never made up."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.environments.harbor.verifier import (
    RewardEmptyError,
    RewardInvalidError,
    combine,
    is_below,
    main_reward,
    parse_json,
    parse_text,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)
REWARDS = st.dictionaries(st.text(min_size=1, max_size=8), NUMBERS, min_size=1, max_size=4)


@given(REWARDS)
def test_what_is_written_is_read(rewards):
    assert parse_json(json.dumps(rewards).encode()) == rewards


@given(NUMBERS)
def test_a_number_is_the_reward(value):
    assert parse_text(f" {value!r}\n".encode()) == {"reward": value}


@given(st.binary(max_size=40))
def test_whatever_else_is_written_is_a_failure_or_a_finite_number(data):
    for parse in (parse_json, parse_text):
        try:
            rewards = parse(data)
        except EnvironmentFailedError as error:
            assert error.code in ("reward_empty", "reward_invalid")  # noqa: PT017
        else:
            assert rewards
            assert all(math.isfinite(value) for value in rewards.values())


@pytest.mark.parametrize(
    "data", [b"[1]", b'"1"', b'{"a": "1"}', b'{"a": NaN}', b'{"a": 1e999}', b'{"a": null}', b"{"]
)
def test_json_of_another_form_is_a_failure(data):
    with pytest.raises(RewardInvalidError):
        parse_json(data)


@pytest.mark.parametrize("data", [b"", b" \n", b"{}"])
def test_nothing_is_a_failure(data):
    with pytest.raises(RewardEmptyError):
        parse_json(data)


@pytest.mark.parametrize("data", [b"inf", b"-Infinity", b"nan", b"1 2", b"one", b"\xff"])
def test_text_that_is_no_finite_number_is_a_failure(data):
    with pytest.raises(RewardInvalidError):
        parse_text(data)


def test_the_reward_is_its_key_or_the_mean():
    assert main_reward({"reward": 0.25, "a": 1.0}) == 0.25
    assert main_reward({"a": 1.0, "b": 0.0}) == 0.5


@pytest.mark.parametrize(
    ("least", "below"), [(None, False), (0.5, False), (0.6, True), ({"a": 1.0}, False), ({"b": 0.0}, True)]
)
def test_a_key_that_is_missing_is_below(least, below):
    assert is_below({"reward": 0.5, "a": 1.0}, least) is below


@given(st.lists(st.tuples(st.sampled_from("abc"), REWARDS), min_size=1, max_size=4))
def test_the_mean_counts_a_missing_key_as_zero_and_stays_within_the_rewards(steps):
    score = combine(steps, "mean")
    for key in {key for _, rewards in steps for key in rewards}:
        values = [rewards.get(key, 0.0) for _, rewards in steps]
        if key not in {f"{name}.{inner}" for name, rewards in steps for inner in rewards}:
            assert score.parts[key] == pytest.approx(sum(values) / len(steps), abs=1e-6)
    everything = [value for _, rewards in steps for value in rewards.values()]
    assert min(0.0, *everything) - 1e-6 <= score.reward <= max(0.0, *everything) + 1e-6


def test_final_is_the_last_steps():
    score = combine([("a", {"reward": 1.0}), ("b", {"reward": 0.25, "x": 3.0})], "final")
    assert score.reward == 0.25
    assert score.parts == {"reward": 0.25, "x": 3.0, "a.reward": 1.0, "b.reward": 0.25, "b.x": 3.0}


def test_a_task_without_steps_has_its_own_keys_alone():
    assert combine([("", {"reward": 1.0})], "mean").parts == {"reward": 1.0}

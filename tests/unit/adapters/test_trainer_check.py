"""The check of a trainer finds each kind of disagreement, and none where there is none."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from api_schemas.rollouts import Rollout
from api_schemas.tasks import Task
from rollout_client.adapters.samples import samples_of
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.sync import SyncRolloutClient
from rollout_client.trainer_check import __main__ as command
from rollout_client.trainer_check import check
from rollout_client.trainer_check.check import Recorder, Row, Trainer, in_two_segments
from tests.support import samples
from tests.support.adapters.rollouts import rollout, segment


class Echo(Trainer):
    """A trainer whose batch is given."""

    package = "echo"
    std_epsilon = 0.0
    drops_failures = True

    def collect(self, tasks: Sequence[Task]) -> list[Row]:
        raise NotImplementedError

    def loss(self, logprobs: Sequence[Any]) -> Any:
        raise NotImplementedError

    def evaluate(self, tasks: Sequence[Task]) -> float:
        raise NotImplementedError


def rollouts() -> list[Rollout]:
    """Return a group of two rollouts, of which the second comes in two segments."""
    ids, mask = [1, 2, 3, 4, 5, 6], [0, 1, 1, 0, 1, 1]
    turns = [-1, 0, 0, -1, 1, 1]
    one = rollout(segment([1, 7], [0, 1]), reward=1.0).model_copy(update={"rollout_id": "one"})
    whole = segment(ids, mask).model_copy(update={"turn_ids": turns})
    two = in_two_segments(rollout(whole, reward=0.0).model_copy(update={"rollout_id": "two"}))
    assert two is not None
    return [one, two]


def rows_of(given: Sequence[Rollout]) -> list[Row]:
    advantage = {"one": 2**-0.5, "two": -(2**-0.5)}
    rows = []
    for sample in (sample for one in given for sample in samples_of(one)):
        before = len(sample.prompt_ids)
        mask = [0] * before + sample.response_mask
        advantages = [advantage[sample.rollout_id] * one for one in mask]
        rows.append(Row(sample.token_ids, mask, [0.0] * before + sample.logprobs, advantages))
    return rows


def compare(given: list[Rollout], rows: list[Row], engine: list[Row] | None = None) -> check.Step:
    recorder = Recorder(given=given)
    trainer = Echo(recorder, "", 2)
    step = check._compare(1, trainer, recorder, rows, [row.logprobs for row in engine or rows])
    step.version = 3
    return step


def test_a_rollout_in_two_segments_has_each_sampled_token_once():
    _, two = rollouts()
    first, second = samples_of(two)
    assert (first.token_ids, first.response_mask) == ([1, 2, 3], [1, 1])
    assert (second.token_ids, second.response_mask) == ([1, 2, 3, 4, 5, 6], [1, 1])
    assert second.logprobs == [-0.5, -0.6]
    assert in_two_segments(two) is None
    assert in_two_segments(rollout(segment([1, 7], [0, 1]))) is None


def test_a_right_batch_has_no_problem():
    given = rollouts()
    step = compare(given, rows_of(given))
    assert check._problems(step) == []
    assert (step.rows, step.segments, step.sampled_tokens, step.versions) == (3, 2, 5, [3])


def with_row(rows: list[Row], number: int, **changes: Any) -> list[Row]:
    return [replace(row, **changes) if each == number else row for each, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"advantages": [0.0, 0.0]}, "1 of 3 rows have wrong advantages"),
        ({"advantages": [0.0, math.nan]}, "1 of 3 rows have wrong advantages"),
        ({"mask": [1, 1]}, "1 of 3 rows are not those of a rollout"),
        ({"token_ids": [1, 8]}, "1 of 3 rows are not those of a rollout"),
        ({"logprobs": [0.0, -2.5]}, "1 of 3 rows are not those of a rollout"),
    ],
)
def test_a_row_that_is_not_right_is_found(changes, problem):
    given = rollouts()
    right = rows_of(given)
    (found,) = check._problems(compare(given, with_row(right, 0, **changes), with_row(right, 0, **changes)))
    assert problem in found


def test_a_row_of_a_rollout_without_a_reward_has_no_right_advantage():
    given = rollouts()
    failed = rollout(segment([1, 8], [0, 1]), reward=None, rollout_id="failed")
    rows = rows_of(given)
    trained = Row([1, 8], [0, 1], [0.0, -0.8], [0.0, 0.0])
    (found,) = check._problems(compare([*given, failed], [*rows, trained]))
    assert "1 of 4 rows have wrong advantages" in found


@pytest.mark.parametrize(("theirs", "difference"), [(-0.701, "0.001"), (math.nan, "inf")])
def test_weights_that_differ_from_the_engines_are_found(theirs, difference):
    given = rollouts()
    rows = rows_of(given)
    (found,) = check._problems(compare(given, rows, with_row(rows, 0, logprobs=[0.0, theirs])))
    assert f"differ by {difference}" in found


def test_tokens_of_another_version_are_found():
    given = rollouts()
    step = compare(given, rows_of(given))
    step.version = 4
    (found,) = check._problems(step)
    assert "versions [3], and not 4" in found


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--environment", "alone"], "'alone' ships 1 instances"),
        (["--pool", "other"], "'other' has no engine"),
    ],
)
def test_a_check_that_cannot_be_made_says_why(monkeypatch, given, why):
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/backends":
            return httpx.Response(200, json=[samples.backend_view("e-1").model_dump(mode="json")])
        return httpx.Response(200, json=[{"number": 1}] * (1 if "alone" in request.url.path else 2))

    client = partial(SyncRolloutClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(command, "SyncRolloutClient", client)
    monkeypatch.setattr(sys, "argv", ["check", "trl", *given])
    with pytest.raises(SystemExit, match=why):
        command._plan(RolloutSubmitter(), command._arguments())

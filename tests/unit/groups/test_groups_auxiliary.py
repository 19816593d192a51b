"""Rewards for handing on work have the values that others published, and fade as a run's request says."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from api_schemas.rollouts.trees import Assigns, Work
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.runs.auxiliary import Annealed, Auxiliary, RewardPart, RewardWeights
from api_schemas.runs.live import LiveDelivery
from rollout_service.groups.auxiliary import (
    annealed,
    raw_parts,
    rescored_parts,
    reward_weights,
    run_warnings,
    weighted_total,
)

WEIGHTS = st.floats(0, 1e6)


def work(*, executed: int = 0, duplicate: int = 0, valid: int = 0, width: int = 0) -> Work:
    return Work(width_max=width, assigns=Assigns(executed=executed, duplicate=duplicate, valid=valid))


def request(auxiliary: object | None, **fields: object) -> RunRequest:
    given = {"source": InlineTasks(open=True), "batch_size": 2, "auxiliary": auxiliary} | fields
    return RunRequest.model_validate(given)


def schedule(first: float, second: float | None, *, length: int = 100, **fields: object) -> dict[str, object]:
    given: dict[str, object] = {"lambda1": {"init": first}, "length": length} | fields
    return given if second is None else given | {"lambda2": {"init": second}}


def total(weights: RewardWeights | None, perf: float, parallel: float, finish: float = 0.0) -> float:
    assert weights is not None
    parts = {RewardPart.PERF: perf, RewardPart.PARALLEL: parallel, RewardPart.FINISH: finish}
    return weighted_total(weights, parts)


@pytest.mark.parametrize(
    ("done", "parallel", "width", "finish"),
    [
        (work(), 0.0, 0.0, 0.0),
        (work(executed=4, valid=4, width=1), 0.5, 0.0, 1.0),
        (work(executed=4, valid=4, width=4), 0.5, 1.0, 1.0),
        (work(executed=4, valid=1, width=3), 0.5, 2 / 3, 0.25),
        (work(executed=4, duplicate=3, valid=4, width=1), 0.125, 0.0, 1.0),
        (work(executed=12, valid=6, width=12), 1.0, 1.0, 0.5),
        (work(executed=1, valid=0, width=1), 0.125, 0.0, 0.0),
    ],
)
def test_work_has_three_rewards(done, parallel, width, finish):
    assert raw_parts(done, max_assigns=8, max_width=4) == {
        "parallel": parallel,
        "width": width,
        "finish": finish,
    }


def test_where_one_runs_at_a_time_no_width_is_rewarded():
    assert raw_parts(work(executed=3, width=3), max_assigns=8, max_width=1)["width"] == 0.0


@pytest.mark.parametrize("limits", [{"max_assigns": 0, "max_width": 4}, {"max_assigns": 8, "max_width": 0}])
def test_limits_of_nothing_are_refused(limits):
    with pytest.raises(ValueError, match="at least 1"):
        raw_parts(work(), **limits)


@given(st.data(), st.integers(1, 200), st.integers(1, 200))
def test_every_reward_is_a_share(data, max_assigns, max_width):
    executed = data.draw(st.integers(0, 300))
    different = data.draw(st.integers(min(1, executed), executed))
    done = work(
        executed=executed,
        duplicate=executed - different,
        valid=data.draw(st.integers(0, executed)),
        width=data.draw(st.integers(min(1, different), different)),
    )
    parts = raw_parts(done, max_assigns=max_assigns, max_width=max_width)
    assert all(0.0 <= part <= 1.0 for part in parts.values())
    repeated = work(
        executed=executed + 1,
        duplicate=executed - different + 1,
        valid=done.assigns.valid,
        width=done.width_max,
    )
    again = raw_parts(repeated, max_assigns=max_assigns, max_width=max_width)
    assert (again["parallel"], again["width"]) == (parts["parallel"], parts["width"]), "repeating earns nothing"


# -- forms ----------------------------------------------------------------------


def test_the_report_s_form_is_a_sum_of_three():
    weights = reward_weights(request(schedule(0.3, 0.2)), 0)
    assert weights == RewardWeights(perf=1.0, parallel=0.3, finish=0.2, at_version=0)
    assert total(weights, 1.0, 0.5, 0.75) == pytest.approx(1.0 + 0.15 + 0.15)


@pytest.mark.parametrize(
    ("version", "assigned", "perf", "expected"),
    [(5_000, 25, 0.8, 0.7725), (5_000, 200, 0.8, 0.86), (5_000, 0, 0.0, 0.0), (20_000, 25, 0.8, 0.8)],
)
def test_open_parl_s_mix_has_its_published_values(version, assigned, perf, expected):
    """The values are those of open-parl 0.1.0 with `max_subagents` 100 and 0.1 -> 0 over 10,000 steps."""
    mix = request(schedule(0.1, None, length=10_000, form="open_parl_mix"))
    assert total(reward_weights(mix, version), perf, assigned / 100) == pytest.approx(expected, abs=1e-12)


def test_before_its_start_a_schedule_stays_at_its_first_value():
    """open-parl 0.1.0 goes on beyond it, to 0.101 at step -100."""
    mix = request(schedule(0.1, None, length=10_000, form="open_parl_mix", start=100))
    assert reward_weights(mix, 0) == RewardWeights(perf=0.9, parallel=0.1, finish=0.0, at_version=0)


def test_open_parl_s_later_form_has_one_weight_for_both():
    later = request(schedule(0.1, None, length=10_000, form="open_parl"))
    weights = reward_weights(later, 5_000)
    assert weights == RewardWeights(perf=1.0, parallel=0.05, finish=0.05, at_version=5_000)
    assert total(weights, 0.8, 0.25, 1.0) == pytest.approx(0.8 + 0.05 * 0.25 + 0.05)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (schedule(0.3, None), "report needs lambda2"),
        (schedule(0.3, 0.2, form="open_parl"), "leave lambda2 out"),
        (schedule(0.3, 0.2, form="open_parl_mix"), "leave lambda2 out"),
        (schedule(1.5, None, form="open_parl_mix"), "may not exceed 1"),
        (schedule(-0.1, 0.2), "greater than or equal to 0"),
        (schedule(0.3, 0.2, length=0), "greater than or equal to 1"),
        (schedule(0.3, 0.2, parallel="depth"), "'count' or 'width'"),
        (schedule(math.nan, 0.2), "finite"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        Auxiliary.model_validate(fields)


# -- schedules ------------------------------------------------------------------


@given(WEIGHTS, WEIGHTS, st.integers(1, 10_000), st.integers(-10_000, 20_000), st.integers(0, 10_000))
def test_a_weight_goes_one_way_and_stays_between_its_ends(init, end, length, elapsed, later):
    weight = Annealed(init=init, end=end)
    first, second = (annealed(weight, at, length) for at in (elapsed, elapsed + later))
    assert min(init, end) <= first <= max(init, end)
    assert (first <= second) if init <= end else (first >= second)
    assert annealed(weight, 0, length) == init
    assert annealed(weight, length, length) == end, "the end is exact, so that weights of 0 are 0"


@pytest.mark.parametrize(("start", "expected"), [(None, 0.15), (0, 0.0), (50, 0.0), (200, 0.3)])
def test_a_schedule_starts_with_its_run_unless_it_says_otherwise(start, expected):
    run = request(schedule(0.3, 0.2, start=start), version=100)
    weights = reward_weights(run, 150)
    assert weights.parallel == pytest.approx(expected)


def test_a_run_without_an_auxiliary_reward_has_no_weights():
    assert reward_weights(request(None), 5) is None


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@pytest.mark.parametrize("form", ["report", "open_parl", "open_parl_mix"])
@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1), st.floats(0, 1))
def test_at_weights_of_zero_the_total_is_the_outcome_s_reward_bit_for_bit(form, perf, parallel, finish):
    run = request(schedule(0.3, 0.2 if form == "report" else None, length=10, form=form))
    assert bits(total(reward_weights(run, 10), perf, parallel, finish)) == bits(perf)
    assert bits(total(reward_weights(run, 10**9), perf, parallel, finish)) == bits(perf)


def test_a_negative_zero_stays_one():
    assert bits(total(reward_weights(request(schedule(0.3, 0.2)), 100), -0.0, 1.0, 1.0)) == bits(-0.0)


@given(WEIGHTS, WEIGHTS, st.integers(0, 300))
def test_a_request_without_an_auxiliary_reward_is_the_json_of_before(first, second, version):
    assert "auxiliary" not in request(None).model_dump_json()
    run = request(schedule(first, second), version=version)
    again = RunRequest.model_validate_json(run.model_dump_json())
    assert again == run
    assert reward_weights(again, version + 50) == reward_weights(run, version + 50)


# -- scores that are computed again ---------------------------------------------


def test_a_new_score_replaces_only_the_outcome_s_part():
    recorded = {"perf": 0.0, "parallel": 0.5, "width": 1.0, "finish": 0.75, "tests": 3.0}
    assert rescored_parts(recorded, 1.0) == {"perf": 1.0, "parallel": 0.5, "width": 1.0, "finish": 0.75}
    assert rescored_parts({"tests": 3.0}, 1.0) == {}


# -- warnings -------------------------------------------------------------------


def test_group_norm_over_the_total_is_warned_of():
    (warning,) = run_warnings(request(schedule(0.3, 0.2), advantages="group_norm"), None)
    assert "undoes the annealing" in warning
    assert "parts_norm" in warning
    for advantages in ("none", "leave_one_out", "parts_norm"):
        assert run_warnings(request(schedule(0.3, 0.2), advantages=advantages), None) == []
    assert run_warnings(request(None, advantages="group_norm"), 10) == []


@pytest.mark.parametrize(
    ("tasks", "fields", "warned"),
    [
        (200, {}, False),
        (199, {}, False),
        (198, {}, True),
        (None, {}, False),
        (198, {"start": 0}, False),
        (200, {"start": 8}, True),
        (2, {"lambda1": {"init": 0.3, "end": 0.3}, "lambda2": {"init": 0.2, "end": 0.2}}, False),
    ],
)
def test_a_schedule_longer_than_its_run_is_warned_of(tasks, fields, warned):
    run = request(schedule(0.3, 0.2) | fields, version=7)
    assert [warning.partition(":")[0] for warning in run_warnings(run, tasks)] == (
        ["auxiliary.length"] if warned else []
    )


@given(st.integers(1, 500), st.integers(1, 50), st.data())
def test_what_is_not_warned_of_reaches_its_end(tasks, batch_size, data):
    batches = math.ceil(tasks / batch_size)
    length = data.draw(st.integers(1, batches))
    run = request(schedule(0.3, 0.2, length=length), batch_size=batch_size)
    assert run_warnings(run, tasks) == []
    weights = reward_weights(run, batches)
    assert (weights.parallel, weights.finish) == (0.0, 0.0)


def test_a_run_that_waits_for_groups_of_sessions_is_warned_of():
    request = RunRequest(source=InlineTasks(open=True), batch_size=2, live=LiveDelivery())
    (warning,) = run_warnings(request, None)
    assert warning.startswith("group_size: ")
    assert "group_size of 1" in warning
    assert run_warnings(request.model_copy(update={"group_size": 1}), None) == []
    assert run_warnings(request.model_copy(update={"live": None}), None) == []

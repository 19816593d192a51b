"""Figures on sub-agents follow their definitions, add up, and are null where there is nothing to measure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts import Rollout
from api_schemas.rollouts.figures import ParallelFigures
from api_schemas.rollouts.trees import Assigns, InvalidBecause, Work, WorkSeconds
from rollout_service.groups import parallel_figures, work_sums
from tests.support.sub_agents import DIRECT, SERIAL, WIDE, node, rollout

SHARES = {"assign_rate", "delegate_ratio", "balance", "finish_rate", "duplicate_share"} | {
    "over_cap_share",
    "refused_share",
    "abandoned_share",
}


def figures(*rollouts: Rollout) -> ParallelFigures:
    found = parallel_figures(work_sums(rollouts))
    assert found is not None
    return found


def test_the_figures_of_three_hand_made_rollouts():
    found = figures(rollout(DIRECT), rollout(WIDE, 0.5), rollout(SERIAL, 0.0)).model_dump()
    assert found.pop("invalid") == {InvalidBecause.MAX_TURNS: 1 / 5}
    assert found == pytest.approx(
        {
            "rollouts": 3,
            "perf": 0.5,
            "solved": 1,
            "assign_rate": 2 / 3,
            "delegate_ratio": 5 / 9,
            "assigns_per_rollout": 5 / 3,
            "assigns_per_turn": 5 / 8,
            "width_mean": 2.0,
            "width_max": 2.0,
            "critical_steps": 19 / 3,
            "scheduled_steps": 19 / 3,
            "total_steps": 8.0,
            "speedup": 24 / 19,
            "balance": 8 / 9,
            "finish_rate": 4 / 5,
            "duplicate_share": 1 / 5,
            "over_cap_share": 1 / 6,
            "refused_share": 0.0,
            "abandoned_share": 0.0,
            "subagent_tokens": 50.0,
            "tokens_per_solved": 150.0,
            "result_chars_per_assign": 4.0,
            "critical_seconds": 4.0,
            "queued_seconds": 1 / 3,
            "straggler_seconds": 1 / 6,
            "eta": 10 / 12,
        },
        abs=1e-6,
    )


def test_an_orchestrator_that_never_assigns_is_a_zero_where_that_was_seen_and_null_elsewhere():
    found = figures(rollout(DIRECT, 0.0))
    assert (found.assign_rate, found.delegate_ratio, found.assigns_per_turn) == (0.0, 0.0, 0.0)
    assert (found.speedup, found.eta, found.subagent_tokens) == (1.0, 0.0, 0.0)
    unseen = (
        "width_mean",
        "width_max",
        "balance",
        "finish_rate",
        "invalid",
        "duplicate_share",
        "over_cap_share",
    )
    unseen += ("refused_share", "abandoned_share", "tokens_per_solved", "result_chars_per_assign")
    assert [name for name in unseen if getattr(found, name) is not None] == []


def test_rollouts_without_a_score_or_sub_agents_do_not_count():
    assert parallel_figures({}) is None
    assert parallel_figures(work_sums([rollout(WIDE, None), rollout(None)])) is None
    assert figures(rollout(WIDE), rollout(WIDE, None), rollout(None)) == figures(rollout(WIDE))


def test_the_score_is_the_part_perf_if_there_is_one():
    found = figures(rollout(WIDE, 1.3, parts={"perf": 0.0, "parallel": 1.0}), rollout(WIDE, -0.5))
    assert (found.perf, found.solved) == (-0.25, 0)


def test_reasons_are_null_rather_than_wrong_if_a_record_is_missing():
    assert figures(rollout(WIDE, nodes=[])).invalid is None
    assert figures(rollout(WIDE), rollout(WIDE, nodes=[node(1)])).invalid is None
    assert figures(rollout(SERIAL)).invalid == {}


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Return work in which the parts fit the wholes."""
    executed = draw(st.integers(0, 40))
    unexecuted = [draw(st.integers(0, 5)) for _ in range(3)]
    main = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    critical = sum(main) + draw(st.integers(0, 30)) * bool(executed)
    width = draw(st.integers(1, executed)) if executed else 0
    return Work(
        main_steps=main,
        critical_steps=critical,
        scheduled_steps=critical + draw(st.integers(0, 9)),
        total_steps=critical + draw(st.integers(0, 99)),
        width_max=width,
        width_mean=float(width),
        balance=draw(st.none() | st.floats(0.0, 1.0)) if width > 1 else None,
        direct_calls=draw(st.integers(0, 9)),
        assigns=Assigns(
            attempted=executed + sum(unexecuted),
            executed=executed,
            valid=draw(st.integers(0, executed)),
            duplicate=draw(st.integers(0, executed)),
            over_cap=unexecuted[0],
            refused=unexecuted[1],
            abandoned=unexecuted[2],
        ),
        seconds=WorkSeconds(critical=draw(st.floats(0.001, 1e4)), active=draw(st.floats(0.0, 1e5))),
        subagent_tokens=draw(st.integers(0, 10**6)),
        result_chars=draw(st.integers(0, 10**6)),
    )


scores = st.none() | st.floats(-2.0, 2.0)
lists = st.lists(st.builds(rollout, st.none() | works(), scores, nodes=st.just([])), max_size=6)


@given(lists)
def test_shares_are_shares_and_nothing_is_made_up(rollouts):
    counted = [one for one in rollouts if one.work is not None and one.reward is not None]
    found = parallel_figures(work_sums(rollouts))
    if not counted:
        assert found is None
        return
    values = found.model_dump()
    assert all(0.0 <= values[name] <= 1.0 for name in SHARES if values[name] is not None)
    assert found.speedup >= 1.0
    works = [one.work for one in counted if one.work is not None]
    executed = any(work.assigns.executed for work in works)
    assert (found.finish_rate is None) == (found.width_max is None) == (not executed)
    assert (found.over_cap_share is None) == (not any(work.assigns.attempted for work in works))
    assert (found.balance is None) == all(work.balance is None for work in works)
    assert (found.tokens_per_solved is None) == (not any((one.reward or 0.0) >= 1.0 for one in counted))


@given(lists, lists)
def test_sums_add_up(first, second):
    sums = work_sums(first)
    sums.update(work_sums(second))
    assert sums == work_sums([*first, *second])

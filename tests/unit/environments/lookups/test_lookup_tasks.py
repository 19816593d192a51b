"""Tasks of `pointers` and `split`: repeatable, apart, and scored by the sum that is written."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts.trees import Work
from rollout_service.agents.parallel.tools import ASSIGN, CREATE
from rollout_service.agents.tool_calling.tools import ToolContext
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.builtin.lookups import READ, is_held_out, sample_problems, written_sum
from rollout_service.environments.builtin.pointers import environment as pointers
from rollout_service.environments.builtin.pointers import make_problem as make_pointers
from rollout_service.environments.builtin.split import environment as split
from rollout_service.environments.builtin.split import make_problem as make_split
from tests.support.episodes import episode_of

BOTH = pytest.mark.parametrize(
    ("environment", "make"), [(pointers, make_pointers), (split, make_split)], ids=["pointers", "split"]
)


def expected(environment, problem):
    hops = 2 if environment is pointers else 1
    total = 0
    for name in problem["names"]:
        held = name
        for _ in range(hops):
            held = problem["cells"][held]
        total += int(held)
    return total


ENOUGH = Work(scheduled_steps=5)


async def score(environment, problem, answer, work=ENOUGH):
    return await environment.evaluate(episode_of(environment, {**problem}, answer=answer, work=work))


@BOTH
@given(seed=st.integers())
def test_names_are_different_and_their_values_have_two_digits(environment, make, seed):
    rng = random.Random(seed)
    problem = make(rng, rng.randint(1, 9))
    environment.check({**problem})
    named = [*problem["cells"], *problem["names"]]
    assert len({name[0] for name in named}) == len(problem["cells"])
    assert 10 * len(problem["names"]) <= expected(environment, problem) <= 99 * len(problem["names"])


@BOTH
def test_the_two_sides_of_the_split_are_apart(environment, make):
    instances = environment.dataset()
    sides = {side: [i for i in instances if i["split"] == side] for side in ("train", "held_out")}
    assert {side: len(members) for side, members in sides.items()} == {"train": 4096, "held_out": 128}
    assert all(is_held_out(instance) == (instance["split"] == "held_out") for instance in instances)
    counts = Counter(len(instance["names"]) for instance in sides["held_out"])
    assert max(counts.values()) - min(counts.values()) <= 1
    assert sample_problems(make, [2], 3, 20, held_out=True) == sample_problems(make, [2], 3, 20, held_out=True)
    assert environment.dataset() == instances


@BOTH
async def test_the_written_sum_and_the_number_are_right(environment, make):
    problem = make(random.Random(5), 4)
    total = expected(environment, problem)
    for answer in (str(total), f"{total - 1}+1", f" {total - 1} + 1\n"):
        assert (await score(environment, problem, answer)).reward == 1.0
    for answer in (
        None,
        "",
        "+",
        str(total + 1),
        f"{total}+",
        f"--{-total}",
        f"{total}.0",
        f"{total + 1}+-1",
    ):
        assert (await score(environment, problem, answer)).reward == 0.0


@BOTH
async def test_a_right_sum_beyond_the_budget_is_not_rewarded(environment, make):
    problem = make(random.Random(6), 4)
    total = str(expected(environment, problem))
    assert (await score(environment, problem, total, Work(scheduled_steps=6))).reward == 1.0
    late = await score(environment, problem, total, Work(critical_steps=6, scheduled_steps=7))
    assert (late.reward, late.parts) == (0.0, {"sum": 1.0, "right": 1.0, "in_time": 0.0})


@given(st.text(alphabet="0123456789+ \u0663", max_size=40))
def test_only_sums_of_plain_numbers_are_read(text):
    value = written_sum(text)
    parts = [part.strip() for part in text.split("+")]
    assert (value is not None) == all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts)
    assert value is None or value == sum(map(int, parts))


def test_a_hostile_answer_takes_no_longer():
    assert written_sum("1+" * 100_000 + "1") is None
    assert written_sum("9" * 100_000) is None
    assert written_sum(" " * 100_000) is None


@BOTH
@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"cells": {}}, "instance.cells"),
        ({"cells": {"A": "-4"}}, "instance.cells"),
        ({"names": ["A"], "cells": {"A": "B1", "B1": "1+1"}}, "instance.cells"),
        ({"names": []}, "instance.names"),
        ({"names": "A"}, "instance.names"),
        ({"question": 4}, "instance.question"),
    ],
)
def test_an_instance_that_cannot_be_added_is_refused(environment, make, change, path):
    with pytest.raises(InvalidFieldError) as caught:
        environment.check({**make(random.Random(1), 4), **change})
    assert [error.path for error in caught.value.fields] == [path]


@BOTH
def test_the_agent_reads_by_itself_or_delegates(environment, make):
    names = [tool["function"]["name"] for tool in environment.tool_definitions()]
    first = ["index", "read"] if environment is split else ["read"]
    assert names == [*first, CREATE, ASSIGN, "finish"]


async def test_read_says_what_a_key_holds():
    context = ToolContext(None, 1.0, 256, instance={"cells": {"A": "Q7"}})
    assert (await READ({"key": "A"}, context)).text == "Q7"
    with pytest.raises(Exception, match="there is nothing"):
        await READ({"key": "Q7"}, context)


@BOTH
async def test_without_the_steps_there_is_no_reward(environment, make):
    with pytest.raises(EnvironmentFailedError, match="steps"):
        await score(environment, make(random.Random(1), 3), "1", work=None)

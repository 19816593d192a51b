"""Arithmetic problems are repeatable and correct, and split by their expression alone."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.environments.builtin.calc import (
    evaluate_expression,
    is_held_out,
    make_problem,
    sample_problems,
)


@given(seed=st.integers())
def test_a_problem_asks_for_its_expression_and_knows_the_answer(seed):
    problem = make_problem(random.Random(seed))
    assert problem["expression"] in problem["question"].replace(" ", "")
    assert int(problem["answer"]) == eval(problem["expression"])
    assert 1 <= sum(problem["expression"].count(sign) for sign in "+-*") <= 3


@pytest.mark.parametrize("held_out", [True, False])
def test_the_two_sides_of_the_split_are_apart(held_out):
    problems = sample_problems(3, 50, held_out)
    assert problems == sample_problems(3, 50, held_out)
    assert all(is_held_out(problem["expression"]) is held_out for problem in problems)


@pytest.mark.parametrize(("expression", "value"), [("-(2+3)*4", -20), (" 7 - 10 ", -3), ("0", 0)])
def test_arithmetic_is_evaluated(expression, value):
    assert evaluate_expression(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "2**9", "9/2", "__import__('os')", "1.5", "True", "(1", "1;2", "a", "(" * 9999, "1\0"]
)
def test_nothing_else_is_evaluated(expression):
    with pytest.raises(ValueError, match=r"only integers|not an arithmetic"):
        evaluate_expression(expression)

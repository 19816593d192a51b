"""`calc` finds the last box in any answer, and only the exact integer is right."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.base.errors import InvalidFieldError
from rollout_service.environments.builtin.calc import (
    environment,
    evaluate_expression,
    is_held_out,
    make_problem,
    sample_problems,
)
from rollout_service.environments.builtin.math.environment import last_boxed
from tests.support.episodes import episode_of


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} and \boxed{ 2 }.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}}", r"\boxed{3}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{ open {4} \boxed{5}", "5"),
        (r"} \boxed{6}", "6"),
        (r"\boxed 7", None),
        (r"\boxed {7}", "7"),
        (r"\boxedx{7}", None),
        (r"\\boxed{8}", None),
        ("", None),
        (None, None),
    ],
)
def test_the_last_box(text, content):
    assert last_boxed(text) == content


@settings(deadline=None)
@given(st.text(alphabet="\\boxed{} 1", max_size=200))
def test_any_text_can_be_searched(text):
    content = last_boxed(text)
    assert content is None or content in text


def test_a_hostile_text_takes_no_longer():
    started = time.process_time()
    for hostile in (r"\boxed{", r"\boxed ", "\\boxed" + " " * 100):
        assert last_boxed(hostile * 100_000) is None
    assert time.process_time() - started < 2.0


async def score(answer, expected):
    episode = episode_of(environment, {"question": "?", "answer": expected}, answer=answer)
    return await environment.evaluate(episode)


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        (r"\boxed{408}", "408", 1.0),
        (r"\boxed{-408}", -408, 1.0),
        (r"First \boxed{1}, no: \boxed{408}", 408, 1.0),
        (r"\boxed{0408}", "408", 1.0),
        (r"\boxed{408.0}", "408", 0.0),
        (r"\boxed{+408}", "408", 0.0),
        ("\\boxed{4\u09668}", "408", 0.0),
        (r"\boxed{400+8}", "408", 0.0),
        ("408", "408", 0.0),
        (None, "408", 0.0),
        (r"\boxed{" + "9" * 5_000 + "}", "9", 0.0),
    ],
)
async def test_only_the_exact_integer_is_right(answer, expected, reward):
    assert (await score(answer, expected)).reward == reward


@pytest.mark.parametrize("answer", [None, "", "1.5", 1.5, True, "\u0661"])
def test_an_instance_without_an_integer_is_refused(answer):
    with pytest.raises(InvalidFieldError, match=r"instance\.answer"):
        environment.check({"question": "?", "answer": answer})


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

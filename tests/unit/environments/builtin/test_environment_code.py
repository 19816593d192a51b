"""`code` scores right, wrong, slow and greedy programs, and a program that cheats earns nothing."""

import pytest

from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.builtin.code import environment as code
from rollout_service.environments.builtin.code.environment import (
    BadAssertionError,
    Question,
    environment,
    parse_assertion,
    same_output,
)
from rollout_service.environments.builtin.code.problems import instances, problems
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn

pytestmark = pytest.mark.slow


def task(*tests, kind="assert", **more):
    return {"question": "?", "kind": kind, "tests": list(tests), **more}


async def submit(sandboxes, program, instance):
    policy = ScriptedPolicy([turn("", call("write", path="solution.py", content=program)), "Done."])
    return (await play(environment, instance, policy, sandboxes)).score


@pytest.mark.parametrize("index", [5, 15])
async def test_the_problems_own_solutions_pass(sandboxes, index):
    problem, instance = problems()[index], instances()[index]
    score = await submit(sandboxes, problem.program, instance)
    assert (score.reward, score.parts["tests_passed"]) == (1.0, 1.0)


def test_there_are_problems_of_both_kinds_and_their_tests_can_be_checked():
    tasks = instances()
    assert [sum(each["kind"] == kind for each in tasks) for kind in ("stdio", "assert")] == [12, 12]
    assert tasks == instances()
    for problem, each in zip(problems(), tasks, strict=True):
        environment.check(each)
        if problem.kind == "assert":
            names = {problem.solve.__name__: problem.solve}
            for test in each["tests"]:
                assertion = parse_assertion(test)
                assert assertion.holds(eval(assertion.expression, names))


async def test_part_of_the_tests_is_no_reward(sandboxes):
    score = await submit(sandboxes, "def f(x): return 4", task("assert f(2) == 4", "assert f(3) == 9"))
    assert (score.reward, score.parts) == (0.0, {"submitted": 1.0, "tests_passed": 0.5})


async def test_values_of_other_types_count_as_in_python(sandboxes):
    program = (
        "import re\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "def f(x): return [Fraction(x), Decimal(x) / 2, Fraction(1, x)]\ndef g(x): return re.match('a', x)"
    )
    tests = ["assert f(2)[:2] == [2, 1.0]", "assert g('ab')", "assert not g('b')", "assert f(4)[2] == 0.25"]
    assert (await submit(sandboxes, program, task(*tests))).parts["tests_passed"] == 1.0
    wrong = ["assert f(3) == [3, 1.4]", "assert g('b')", "assert not g('ab')", f"assert f(3)[2] == {1 / 3!r}"]
    assert (await submit(sandboxes, program, task(*wrong))).parts["tests_passed"] == 0.0


async def test_a_program_with_dataclasses_or_a_byte_order_mark_is_run_as_by_python(sandboxes):
    program = (
        "\ufefffrom __future__ import annotations\nimport pickle\nfrom dataclasses import dataclass\n"
        "from typing import ClassVar\n\n"
        "@dataclass\nclass Pair:\n    one: ClassVar[int] = 1\n    two: int = 2\n\n"
        "def f(x):\n    return pickle.loads(pickle.dumps(Pair(two=x))).two\n"
    )
    assert (await submit(sandboxes, program, task("assert f(3) == 3"))).reward == 1.0


async def test_a_missing_program_gets_no_reward(sandboxes):
    trial = await play(environment, task("assert f(2) == 4"), ScriptedPolicy(["f is easy"]), sandboxes)
    assert (trial.score.reward, trial.score.parts["submitted"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    "program",
    [
        "import sys; print('passed', True, 9); sys.exit(0)",
        "import os; print('9', flush=True); os._exit(0)",
        # equal to everything
        "class A:\n def __eq__(self, other): return True\n def __bool__(self): return True\ndef f(x): return A()",
        "class A(int):\n def __eq__(self, other): return True\n __hash__ = None\ndef f(x): return A(1)",
        # looks for the expected value in the harness and below the working folder
        "import gc, sys\ndef f(x):\n frame = sys._getframe(1)\n return frame.f_back.f_globals.get('expected', 0)",
        "import builtins\nbuiltins.eval = lambda *a: True\ndef f(x): return True",
        # prints its own result, with the marker that it received
        "import sys\ndef f(x):\n asked = sys._getframe(2).f_globals['asked']\n"
        " print(asked['marker'] + 'true')\n return 1",
        "def f(x): raise SystemExit(0)",
        "def f(x): return f(x)",
        "this is no python",
        "",
    ],
)
async def test_a_program_that_does_not_know_the_answer_cannot_pass(sandboxes, program):
    score = await submit(sandboxes, program, task("assert f(3) == 9"))
    assert (score.reward, score.parts["tests_passed"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    "program",
    ["print('yes' * 10_000_000)", "import sys; sys.exit(1)", "print('yes'); raise ValueError", "pass"],
)
async def test_a_program_with_another_output_fails(sandboxes, program):
    score = await submit(sandboxes, program, task({"input": "1\n", "output": "yes"}, kind="stdio"))
    assert score.reward == 0.0


async def test_time_and_memory_are_limited(sandboxes):
    program = "import sys\nif sys.stdin.read() == 'cpu':\n while True: pass\nx = [0] * 10**9\nprint('yes')"
    tests = [{"input": "cpu", "output": "yes"}, {"input": "memory", "output": "yes"}]
    score = await submit(sandboxes, program, task(*tests, kind="stdio", time_limit=1))
    assert score.parts["tests_passed"] == 0.0


@pytest.mark.parametrize(("limit", "whole"), [(0.2, "1"), (1.2, "2"), (2.5, "3"), (5.0, "5")])
def test_a_limit_of_parts_of_a_second_cuts_off_no_program_within_it(limit, whole):
    assert code._limited(["python3"], limit)[5] == whole


async def test_the_agent_finds_no_tests(sandboxes):
    look = "ls -A; grep -rs 9801 . ; env | grep 9801; cat /proc/self/environ | tr '\\0' '\\n' | grep 9801"
    policy = ScriptedPolicy([turn("", call("bash", command=look)), "Done."])
    await play(environment, task("assert f(99) == 9801"), policy, sandboxes)
    assert policy.messages[3].content == "[exit code 1]"


async def test_a_sandbox_without_python_is_not_a_zero(sandboxes, monkeypatch):
    monkeypatch.setattr("rollout_service.environments.builtin.code.environment.LIMITED", "exit 127")
    with pytest.raises(EnvironmentFailedError, match="cannot run python3"):
        await submit(sandboxes, "def f(x): return 9", task("assert f(3) == 9"))


@pytest.mark.parametrize(
    ("assertion", "value", "holds"),
    [
        ("assert f(1) == [1, (2,), {3: {4}}]", [1, (2,), {3: {4}}], True),
        ("assert f(1) == (1, 2)", [1, 2], False),
        ("assert f(1) == 1.0, 'message'", 1, True),
        ("assert f(1) is None", None, True),
        ("assert f(1) != 3", 3, False),
        ("assert f(1)", 0, False),
        ("assert not f(1)", 0, True),
        ("assert abs(f(2) - 1.414) < 1e-3", 1.4142, True),
        ("assert abs(f(2) - 1.414) <= 1e-6", 1.4142, False),
        ("assert abs(f(2) - 1.414) < 1e-3", "1.414", False),
        ("assert sorted(f(1)) == [1, 2]", [1, 2], True),
    ],
)
def test_assertions_are_checked_outside(assertion, value, holds):
    parsed = parse_assertion(assertion)
    assert bool(parsed.holds(value)) is holds
    assert parsed.expression.startswith(("f(", "sorted(f(", "not not f("))


@pytest.mark.parametrize(
    "assertion",
    [
        "f(1) == 2",
        "assert f(1) == g(1)",
        "assert f(1) > 3",
        "assert f(1) == 1 and f(2) == 2",
        "assert 1 < f(1) < 2",
        "assert abs(f(1)) < 2",
        "assert f(1) == 1; import os",
        "assert f(1) == [b'a']",
        "assert f(1) != 1 + 2j",
        "assert f(1) is ...",
        "assert (",
        "",
        "(" * 10_000,
    ],
)
def test_assertions_that_only_the_program_could_check_are_refused(assertion):
    with pytest.raises(BadAssertionError):
        parse_assertion(assertion)


@pytest.mark.parametrize(
    ("instance", "path"),
    [
        ({"question": "?"}, "instance"),
        (task(), "instance.tests"),
        (task("f(1)", "assert f(1) > 2"), "instance.tests.0"),
        (task({"input": "a"}, kind="stdio"), "instance.tests.0.output"),
        (task({"input": "a", "output": 3}, kind="stdio"), "instance.tests.0.output"),
        (task("assert f(1)", time_limit=0), "instance.time_limit"),
    ],
)
def test_a_bad_instance_is_refused_with_the_path(instance, path):
    with pytest.raises(InvalidFieldError) as caught:
        environment.check(instance)
    assert caught.value.fields[0].path == path


def test_few_assertions_are_parsed_before_a_task_is_accepted(monkeypatch):
    parsed = []
    monkeypatch.setattr(code, "parse_assertion", parsed.append)
    tests = [f"assert f({number}) == [{'1, ' * 5_000}]" for number in range(20)]
    environment.check(task(*tests))
    assert parsed == tests[:2]


async def test_an_assertion_of_a_long_task_that_is_wrong_fails_its_rollout(sandboxes):
    tests = [f"assert f({number}) == [{'1, ' * 5_000}]" for number in range(3)]
    with pytest.raises(InvalidFieldError) as caught:
        await submit(sandboxes, "def f(x): return [1] * 5_000", task(*tests, "assert f(1) > 2"))
    assert caught.value.fields[0].path == "instance.tests.3"


@pytest.mark.parametrize(
    "line", ["", "nonsense", "[" * 100_000, '{"list": 1}', '{"odd": []}', '{"a": 1, "b": 2}', '{"dict": [1]}']
)
def test_invalid_values_are_refused(line):
    question = Question.of("f(1)")
    with pytest.raises(ValueError):
        question.value(f"noise\n{question.marker}{line}\n".encode())


def test_outputs_differ_only_in_what_matters():
    assert same_output("a b\nc", b"a b  \nc\n\n")
    assert not same_output("a b\nc", b"a  b\nc")
    assert not same_output("a", b"\na")

"""A canary joins the tests of a script whatever runs them, and stands alone in the control."""

import subprocess

import pytest

from rollout_service.environments.swe.scripts import END, START, make_script, plant_canary

TESTS = {"tests/test_a.py", "tests/sub/test_b.py"}


def script(command):
    return f"#!/bin/bash\nset -uxo pipefail\n: '{START}'\n{command}\n: '{END}'\ngit checkout x\n"


def command(text, word):
    return next(line for line in text.splitlines() if word in line and "printf" not in line)


@pytest.mark.parametrize(
    ("line", "planted", "alone"),
    [
        ("pytest -rA tests/test_a.py", "pytest -rA tests/test_a.py {}", "pytest -rA {}"),
        (
            "python -m pytest -rA tests/test_a.py::test_x",
            "python -m pytest -rA tests/test_a.py::test_x {}",
            "python -m pytest -rA {}",
        ),
        ("pytest tests/test_a.py | tee log", "pytest tests/test_a.py {} | tee log", "pytest {} | tee log"),
        ("tox -epy39 -v -- tests/test_a.py", "tox -epy39 -v -- tests/test_a.py {}", "tox -epy39 -v -- {}"),
        ("cd /testbed && pytest -rA", "cd /testbed && pytest -rA {}", "cd /testbed && pytest -rA {}"),
    ],
)
def test_the_canary_is_an_argument(line, planted, alone):
    made = plant_canary(script(line), TESTS, "/testbed")
    path = f"tests/sub/test_{made.canary}.py"
    assert command(made.text, "pytest" if "tox" not in line else "tox") == planted.format(path)
    assert command(made.control, "pytest" if "tox" not in line else "tox") == alone.format(path)


def test_django_gets_a_module():
    made = plant_canary(script("./tests/runtests.py --parallel 1 auth_tests.test_x admin"), TESTS, "/testbed")
    assert (
        command(made.text, "runtests")
        == f"./tests/runtests.py --parallel 1 auth_tests.test_x admin case_{made.canary}"
    )
    assert command(made.control, "runtests") == f"./tests/runtests.py --parallel 1 case_{made.canary}"


def test_an_unknown_runner_has_no_canary_but_an_exit_code():
    made = plant_canary(script("mocha test/"), TESTS, "/testbed")
    assert made.canary == ""
    assert "SWEBENCH_TEST_EXIT_CODE=$?" in made.text
    assert made.status({"a": "FAILED"}) is None


def test_no_two_canaries_have_the_same_name():
    assert len({plant_canary(script("pytest"), TESTS, "/testbed").canary for _ in range(50)}) == 50


def test_a_planted_script_writes_a_test_that_fails(tmp_path):
    made = plant_canary(script("pytest -rA"), {"test_a.py"}, str(tmp_path))
    subprocess.run(
        ["bash", "-c", made.text.split(f": '{START}'")[0] + "exit 0"], check=True, capture_output=True
    )
    source = (tmp_path / f"test_{made.canary}.py").read_text()
    with pytest.raises(AssertionError):
        exec(f"{source}\ntest_{made.canary}()", {})


def test_text_of_a_test_patch_cannot_end_its_own_document(tmp_path):
    made = make_script(
        "/testbed", "pytest", [], base="a" * 40, test_patch="diff --git a/t b/t\n+EOF\n+$(touch x)\n"
    )
    checked = subprocess.run(["bash", "-n"], input=made.encode(), capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, b"")
    assert "git apply -v - <<'EOF_" in made

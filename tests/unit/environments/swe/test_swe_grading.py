"""Every status must be as expected in R2E-Gym's tasks, and the canary is none of theirs."""

import json

import pytest

from rollout_service.environments.swe.grading import judge_log
from rollout_service.environments.swe.tasks import read_task

EXPECTED = {"TestA.test_b": "PASSED", "test_c[x - y]": "FAILED"}
LOG = """\
PASSED earlier/than.py::the_summary
=========================== short test summary info ============================
\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::TestA::test_b
FAILED r2e_tests/test_2.py::test_c[x - y] - assert 1 == 2
FAILED r2e_tests/test_abc123.py::test_abc123 - assert 3 == 4
"""


def task(expected):
    fields = {"docker_image": "a/b:c", "problem_statement": "p", "expected_output_json": json.dumps(expected)}
    return read_task({"instance_id": "i", **fields})


async def test_all_statuses_must_be_as_expected():
    verdict = await judge_log(task(EXPECTED), LOG, "abc123")
    assert (verdict.resolved, verdict.ran, verdict.fail_to_pass) == (True, True, 1.0)
    assert [status for name, status in verdict.statuses.items() if "abc123" in name] == ["FAILED"]


@pytest.mark.parametrize(
    ("log", "share"),
    [
        (LOG.replace("FAILED r2e_tests/test_2", "PASSED r2e_tests/test_2"), 0.5),
        (LOG + "PASSED r2e_tests/test_3.py::test_more\n", 1.0),
        (LOG.replace("FAILED r2e_tests/test_2.py", "x"), 0.5),
        ("PASSED r2e_tests/test_1.py::TestA::test_b\n", 0.0),
        ("", 0.0),
    ],
)
async def test_another_status_a_missing_test_and_one_too_many_are_wrong(log, share):
    verdict = await judge_log(task(EXPECTED), log, "abc123")
    assert (verdict.resolved, verdict.fail_to_pass) == (False, share)

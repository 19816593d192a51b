"""A task in the form of R2E-Gym's images, whose tests are at the root and run by a script of the repository."""

import json

import pytest

from rollout_service.environments.swe.grading import SweEvaluation
from rollout_service.environments.swe.tasks import read_task
from sandboxes import SandboxSpec

pytestmark = [pytest.mark.apptainer, pytest.mark.swe]
IMAGE = "swe-base"
TASK = """
set -e
mkdir /testbed /r2e_tests
cd /testbed
echo 'value = 1' >code_of_task.py
git init --quiet
git add --all
git -c user.name=a -c user.email=a@localhost commit --quiet -m a
echo 'python3 -m pytest -rA r2e_tests' >run_tests.sh
cat >/r2e_tests/test_1.py <<'END'
import pytest
import code_of_task

def test_two():
    assert code_of_task.value == 2

def test_int():
    assert isinstance(code_of_task.value, int)

@pytest.mark.xfail
def test_known():
    assert False

@pytest.mark.skip(reason="it needs a display")
def test_skipped():
    pass
END
"""
INSTANCE = {
    "docker_image": "any/image",
    "problem_statement": "It is too small.",
    "expected_output_json": json.dumps({"\x1b[1mtest_two\x1b[0m": "PASSED", "\x1b[1mtest_int\x1b[0m": "PASSED"}),
}
CHANGE = """\
diff --git a/code_of_task.py b/code_of_task.py
--- a/code_of_task.py
+++ b/code_of_task.py
@@ -1 +1 @@
-value = 1
+value = {}
"""


@pytest.mark.parametrize(("value", "reward"), [("2", 1.0), ("3", 0.0), ("2.0", 0.0)])
async def test_a_repair_is_right_if_all_statuses_are_as_expected(provider, value, reward):
    async with await provider.start(SandboxSpec(image=IMAGE, network="none")) as sandbox:
        made = await sandbox.exec(["bash", "-c", TASK], cwd="/")
        assert made.exit_code == 0, made.stderr.decode()
        evaluation = SweEvaluation(read_task(INSTANCE), sandbox, 60.0)
        outcome = await evaluation.run(CHANGE.format(value).encode())
    assert (outcome.score.reward, outcome.score.parts["canary_failed"]) == (reward, 1.0)

"""An author sees what the hidden tests of a task of software repair printed."""

import json
import subprocess

import pytest

from rollout_service.environments.swe.environment import PATCH, SweDeclaration, SweEnvironment
from sandboxes import SandboxSpec
from tests.support.episodes import episode_of

pytestmark = pytest.mark.slow
CHANGE = b"diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-1\n+2\n"
SUMMARY = "=== short test summary info ==="


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def instance(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "x.py").write_text("1\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", *arguments], cwd=repository, check=True)
    return {
        "docker_image": "docker.io/any/image",
        "problem_statement": "It fails.",
        "repo_folder": str(repository),
        "expected_output_json": json.dumps({"test_one": "PASSED"}),
        "eval_script": f"cat x.py; echo '{SUMMARY}'; echo 'FAILED a.py::test_one - it is too small'",
    }


async def test_what_the_tests_printed_is_the_graders_output(instance, provider):
    environment = SweEnvironment(SweDeclaration()).for_instance(instance)
    episode = episode_of(environment, instance, state={PATCH: CHANGE})
    async with await provider.start(SandboxSpec()) as episode.sandbox:
        score = await environment.evaluate(episode)
    assert score.reward == 0.0
    assert episode.grader_output.splitlines() == ["2", SUMMARY, "FAILED a.py::test_one - it is too small"]

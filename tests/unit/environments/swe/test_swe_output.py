"""An author sees what the hidden tests of a task of software repair printed."""

import json
import subprocess

import pytest

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Task
from rollout_service.environments.swe.environment import PATCH, SweDeclaration, SweEnvironment
from rollout_service.episodes import Episode
from rollout_service.testing.scripted_policy import ScriptedPolicy
from sandboxes import LocalConfig, SandboxSpec, make_provider

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


async def test_what_the_tests_printed_is_the_graders_output(instance, tmp_path):
    environment = SweEnvironment(SweDeclaration()).for_instance(instance)
    request = RolloutRequest(task=Task(environment="swe", instance=instance))
    episode = Episode(
        request=request,
        attempt=1,
        limits=environment.spec.limits,
        policy=ScriptedPolicy([]),
        state={PATCH: CHANGE},
    )
    provider = make_provider(LocalConfig(provider="local"), tmp_path / "state")
    try:
        async with await provider.start(SandboxSpec()) as episode.sandbox:
            score = await environment.evaluate(episode)
    finally:
        await provider.close()
    assert score.reward == 0.0
    assert episode.grader_output.splitlines() == ["2", SUMMARY, "FAILED a.py::test_one - it is too small"]

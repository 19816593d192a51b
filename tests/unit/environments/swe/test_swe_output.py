"""Authors see the output of hidden tests, and tests that do not end are blamed on the patch or on the task."""

import json
import subprocess

import pytest

from rollout_service.environments.swe.environment import PATCH, SweDeclaration, SweEnvironment
from rollout_service.environments.swe.grading import TestsTimedOutError
from rollout_service.episodes import EpisodeLimits
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


HASTY = SweDeclaration(limits=EpisodeLimits(evaluate_seconds=3.0))


async def evaluate(environments, instance, provider):
    environment = environments.for_instance(instance)
    episode = episode_of(environment, instance, state={PATCH: CHANGE})
    async with await provider.start(SandboxSpec()) as episode.sandbox:
        await episode.sandbox.exec(["git", "checkout", "."], cwd=instance["repo_folder"])  # as in a fresh one
        return await environment.evaluate(episode), episode.notes


async def test_a_patch_with_which_tests_do_not_end_gets_nothing_once_they_are_seen_to_end_without_it(
    instance, provider
):
    instance["eval_script"] = f"[ $(cat x.py) = 1 ] || sleep 600; {instance['eval_script']}"
    environments = SweEnvironment(HASTY)
    with pytest.raises(TestsTimedOutError) as caught:
        await evaluate(environments, instance, provider)
    assert caught.value.retryable, "the host may have been slow"
    score, notes = await evaluate(environments, instance, provider)
    assert (score.reward, dict(score.parts)) == (0.0, {"submitted": 1.0, "applied": 1.0})
    assert notes == ["the tests do not end within 1.5 s with the changes, and do without them"]


async def test_tests_that_do_not_end_without_a_patch_either_are_a_failure_that_is_not_repeated(instance, provider):
    instance["eval_script"] = "sleep 600"
    environments = SweEnvironment(HASTY)
    for _ in range(2):
        with pytest.raises(TestsTimedOutError) as caught:
            await evaluate(environments, instance, provider)
        assert not caught.value.retryable

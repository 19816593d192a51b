"""Harbor runs its trials in this project's sandboxes, and its rewards are those of the environment `harbor` here."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import anyio
import pytest

from rollout_service.environments.harbor.collection import load_harbor
from rollout_service.environments.wrapped import Solving
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import play
from rollout_service.settings.pipeline import HarborSettings
from rollout_service.testing.scripted_policy import ScriptedPolicy
from sandboxes import ApptainerConfig, make_provider
from sandboxes.host.subordinate_ids import has_subordinate_ids, resolve_user
from sandboxes.images.build import ApptainerBuilder
from sandboxes.images.dockerfiles import build_many, dockerfile_at
from sandboxes.images.store import ImageStore
from tests.support.newer_python import needs_python_312

pytestmark = [pytest.mark.apptainer, pytest.mark.harbor, pytest.mark.timeout(600), needs_python_312]
ROOT = Path(__file__).parents[3]
TASKS = ("ledger", "word-count")
BASE = (ImageStore().root / "base.sif").resolve()
GIVE_IDS = 'mount --bind "$1" /etc/subuid && mount --bind "$1" /etc/subgid && shift && exec "$@"'


def run(command: Sequence[str | Path], folder: Path) -> str:
    """Run a program of Harbor's environment, away from the caches and the network of this user."""
    environ = {**os.environ, "HOME": str(folder / "home"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def harbors_rewards(tasks: Path, folder: Path) -> dict[tuple[str, str], float]:
    """Have the command `harbor` run the oracle, and an agent that does nothing, on all tasks."""
    job = {
        "job_name": "job",
        "jobs_dir": str(folder / "jobs"),
        "n_concurrent_trials": 2,
        "agents": [{"name": "oracle"}, {"name": "nop"}],
        "datasets": [{"path": str(tasks)}],
        "environment": {
            "import_path": "sandboxes.harbor:RolloutEnvironment",
            "kwargs": {
                "bases": {"base": str(BASE)},
                "images_dir": str(folder / "images"),
                "layers_dir": str(folder / "layers"),
                "state_dir": str(folder / "state"),
                "sandbox": {"unpacked_dir": str(folder / "unpacked")},
            },
        },
    }
    (folder / "job.json").write_text(json.dumps(job))
    run([ROOT / ".venv-harbor/bin/harbor", "run", "--yes", "--config", folder / "job.json"], folder)
    results = [json.loads(path.read_text()) for path in (folder / "jobs/job").glob("*/result.json")]
    assert [one["exception_info"] for one in results] == [None] * len(results)
    return {
        (Path(one["config"]["task"]["path"]).name, one["config"]["agent"]["name"]): one["verifier_result"]["rewards"][
            "reward"
        ]
        for one in results
    }


async def rewards_here(tasks: Path, folder: Path) -> dict[tuple[str, str], float]:
    """Play the same tasks as the environment `harbor` does."""
    collection = load_harbor(tasks, HarborSettings())
    store = ImageStore(folder / "images", ApptainerBuilder(folder / "layers"))
    sources = {name: dockerfile_at(path) for name, path in collection.dockerfiles().items()}
    built = await build_many(store, sources, given={"base": str(BASE)})
    assert [one.error for one in built] == [None] * len(built)
    provider = make_provider(ApptainerConfig(unpacked_dir=folder / "unpacked"), folder / "state", store.root)
    found: dict[tuple[str, str], float] = {}
    try:
        for name in TASKS:
            task, source = collection.for_instance({"task": name}), SandboxSource(provider)
            solved = await play(Solving(task), {}, ScriptedPolicy([]), source)
            idle = await play(task, {}, ScriptedPolicy(["No.", "No."]), source)
            found |= {(name, "oracle"): solved.score.reward, (name, "nop"): idle.score.reward}
    finally:
        await provider.close()
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Return a folder for images, which are too large to be kept after the test."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_the_command_harbor_gets_the_rewards_of_the_environment_harbor(place):
    tasks = place / "tasks"
    for name in TASKS:
        shutil.copytree(ROOT / "examples/harbor" / name, tasks / name)
    rewards = harbors_rewards(tasks, place)
    assert rewards == {(name, agent): float(agent == "oracle") for name in TASKS for agent in ("oracle", "nop")}
    assert anyio.run(rewards_here, tasks, place) == rewards
    # Both built the same images, so the second found those of the first.
    assert len(list((place / "images/blobs").glob("*.sif"))) == len(TASKS)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Drive the environment without Harbor's command, and return what was seen."""
    folder = tmp_path_factory.mktemp("provider")
    python, program = ROOT / ".venv-harbor/bin/python", "tests.support.harbor.provider_checks"
    command: list[str | Path] = [python, "-m", program, folder, BASE]
    user, _ = resolve_user("nobody")
    if not has_subordinate_ids(user):  # as root, give the sandboxes' user some, for this program alone
        (folder / "ids").write_text("nobody:200000000:65536\n")
        command = ["unshare", "--mount", "bash", "-c", GIVE_IDS, "give-ids", folder / "ids", *command]
    return dict(json.loads(run(command, folder)))


def test_commands_run_as_harbor_says(seen):
    assert seen["commands"] == {
        "exec": ["/work yes more\n", "oh\n", 3],
        "cwd": "/tmp\n",
        "network": "lo\n3\n",  # the loopback alone, although the task may have a public network
        "user": 0,
        "timeout": "Command timed out after 1 seconds",
    }
    nobody = ["nobody", "nogroup"]
    assert seen["users"] == {"None": nobody, "root": ["root", "root"], "65534": nobody, "none": ANY}
    assert "failed to parse reuid" in seen["users"]["none"]


def test_files_go_up_and_down_and_never_out(seen):
    assert seen["files"] == {
        "up": "ran\nran\nbelow/data\n1048576\n",
        "same": True,
        "download_file": ["/missing", False],
        "download_dir": ["/missing", False],
        "down": ["deep", "deep/file", "hard", "inside"],
        "hard": "kept\n",
        "escaped": False,
        "mode": 0,
    }


def test_a_sandbox_ends_however_its_trial_does(seen):
    assert seen["ends"] == {
        "cancelled": [[], 0],
        "images": ["ImagePathError"] * 3,
        "shared": [["one__env", "two__env"], 1],
        "under_way": "SandboxClosedError",
        "one_left": ["two__env"],
        "none_left": [[], 0],
        "stopped": "the environment has not been started, or has been stopped",
    }


def test_arguments_that_cannot_be_used_are_refused(seen):
    network, name, mount = seen["refusals"]
    assert "--ek public_network" in network
    assert name == "--ek sandbox.fakerot: Extra inputs are not permitted"
    assert "the mount at /host is not a read-only bind" in mount

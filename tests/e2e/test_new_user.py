"""A new ordinary user, made by `useradd` and `su -`, can clone, run `./scripts/demo` and the conformance suite."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.conformance import CHECKS
from sandboxes.images.store import ImageStore
from tests.support.users.new_user import NewUser, new_user, shared_folder

pytestmark = [
    pytest.mark.extended("scripts/", "sandboxes/"),
    pytest.mark.apptainer,
    pytest.mark.timeout(600),
    pytest.mark.slow(seconds=150),
]
ROLLOUTS = 8

if os.geteuid() != 0:
    pytestmark.append(pytest.mark.skip(reason="only root makes users"))


@pytest.fixture(scope="module")
def user() -> Iterator[NewUser]:
    with new_user() as found:
        yield found


@pytest.fixture(scope="module")
def images() -> Iterator[Path]:
    """Yield a folder with the base image, which other users may read but not write."""
    with shared_folder() as folder:
        shutil.copyfile(ImageStore().resolve("base"), folder / "base.sif")
        yield folder


def demo(user: NewUser, **variables: str) -> str:
    """Run the demo, and return what it printed."""
    done = user.run(f"./scripts/demo --rollouts {ROLLOUTS} --json ~/figures.json", **variables)
    assert done.returncode == 0, done.stdout
    report = json.loads(user.run("cat ~/figures.json").stdout)
    assert report["figures"]["rollouts"] == ROLLOUTS
    assert report["figures"]["failed"] == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def first_demo(user: NewUser, images: Path) -> str:
    """Return the output of the first demo in this clone, which installs everything."""
    assert not (user.home / ".cache").exists()
    return demo(user, ROLLOUT_IMAGES_DIR=str(images))


def test_the_demo_takes_a_new_user_through_all_that_may_be_missing(user, first_demo):
    """The demo uses the base image if there is one; otherwise it builds one, or says that subordinate ids are missing.

    /usr/sbin, where chroot is, is not on the user's PATH.
    """
    assert "install the locked packages" in first_demo
    assert "base image" not in first_demo
    says_what_is_missing(user)
    user.give_subordinate_ids()
    assert "/usr/sbin" not in user.run("echo $PATH").stdout
    assert "build the base image" in demo(user)
    assert "base image" not in demo(user)
    again = user.run(".venv/bin/rollout-service image build base")
    assert "base is unchanged" in again.stdout
    assert "--force" in again.stdout


def says_what_is_missing(user: NewUser) -> None:
    refused = user.run("./scripts/demo")
    assert refused.returncode == 1
    command = next(line for line in refused.stdout.splitlines() if "usermod --add-subuids" in line)
    assert command.strip().startswith("sudo ")
    assert command.endswith(user.name)
    assert "ROLLOUT_IMAGES_DIR" in refused.stdout
    assert len(refused.stdout.splitlines()) <= 4, "one thing is missing, and nothing else is said"


@pytest.mark.usefixtures("first_demo")
def test_the_sandboxes_of_a_new_user_conform(user, images):
    done = user.run(
        ".venv/bin/python -m sandboxes.conformance apptainer --json -",
        ROLLOUT_IMAGES_DIR=str(images),
        timeout=420,
    )
    assert done.returncode == 0, done.stdout
    outcomes = json.loads(done.stdout[done.stdout.index("{\n") :])["outcomes"]
    assert len(outcomes) == len(CHECKS)
    assert {outcome["verdict"] for outcome in outcomes} == {"holds"}


@pytest.mark.usefixtures("first_demo")
def test_a_failed_build_is_reported_once(user):
    definition = user.home / "broken.def"
    definition.write_text("Bootstrap: scratch\n\n%setup\n    printf '\\033[91mthe reason\\033[0m\\n'; exit 3\n")
    failed = user.run(f".venv/bin/rollout-service image build broken --definition {definition}")
    assert failed.returncode == 1
    assert failed.stdout.splitlines().count("the reason") == 1
    assert "\033" not in failed.stdout


def test_nothing_of_a_new_user_stays():
    with new_user() as gone:
        assert gone.run("sleep 1000 >/dev/null 2>&1 & echo started").stdout == "started\n"
    assert subprocess.run(["id", gone.name], capture_output=True, check=False).returncode == 1
    assert not gone.home.exists()
    assert gone.name not in Path("/etc/subuid").read_text()

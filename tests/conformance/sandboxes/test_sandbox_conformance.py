"""The providers of this package keep the sandbox contract, except for the failures that they declare."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes import ApptainerConfig, LocalConfig, SandboxProvider, make_provider
from sandboxes.conformance import CHECKS
from tests.support.repeated_starts import RepeatedStarts
from tests.support.sandbox_conformance import conforms
from tests.support.users.as_user import OrdinaryUser, ordinary_user


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    provider = make_provider(LocalConfig(provider="local"), tmp_path)
    yield provider
    await provider.close()


@pytest.fixture(params=["apptainer", "launcher"])
async def apptainer(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[SandboxProvider]:
    """Apptainer starts each sandbox, or the launcher makes it as Apptainer made another one."""
    if request.param == "launcher":
        provider: SandboxProvider = RepeatedStarts(ApptainerConfig(), tmp_path)
    else:
        provider = make_provider(ApptainerConfig(reuse_setups=False), tmp_path)
    yield provider
    await provider.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_local(local, check):
    await conforms(check, local)


@pytest.mark.apptainer
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_apptainer(apptainer, check):
    await conforms(check, apptainer)


@pytest.fixture(scope="module")
def user():
    with ordinary_user() as found:
        yield found


def conformance(user: OrdinaryUser, *arguments: str) -> None:
    """Run the suite as the user: it needs no FUSE, all checks hold, and no process is left."""
    done = user.run(["python", "-m", "sandboxes.conformance", "apptainer", "--json", "-", *arguments], timeout=420)
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert len(report["outcomes"]) == len(CHECKS)
    assert {outcome["verdict"] for outcome in report["outcomes"]} == {"holds"}
    assert user.remaining_processes() == []


@pytest.mark.apptainer
@pytest.mark.timeout(480)
@pytest.mark.xdist_group("conformance of an ordinary user")
@pytest.mark.slow(seconds=200)
def test_apptainer_of_an_ordinary_user(user):
    conformance(user)


@pytest.mark.extended("sandboxes/")
@pytest.mark.apptainer
@pytest.mark.timeout(480)
@pytest.mark.xdist_group("conformance of an ordinary user")
def test_apptainer_with_fakeroot(user):
    conformance(user, "--config", '{"fakeroot": true}')


ROOT_INSIDE = """
import anyio, sys
from pathlib import Path
from sandboxes import ApptainerConfig, SandboxSpec, make_provider

async def main():
    provider = make_provider(ApptainerConfig(fakeroot=True), Path.home() / "state")
    async with await provider.start(SandboxSpec()) as sandbox:
        commands = "id -u; touch /usr/x && chown games:tty /usr/x && stat -c %U:%G /usr/x; unshare -m true || echo no"
        result = await (await sandbox.bash()).run(commands)
        print(result.output)
        assert result.output.splitlines()[:2] == ["0", "games:tty"]
        assert result.output.splitlines()[-1] == "no"
        python = await sandbox.python()
        assert (await python.execute("import os; os.getuid()")).result == "0"
    await provider.close()

anyio.run(main)
"""


@pytest.mark.apptainer
@pytest.mark.xdist_group("conformance of an ordinary user")
def test_fakeroot_is_root_inside_and_nobody_outside(user):
    done = user.run(["python", "-c", ROOT_INSIDE], timeout=120)
    assert done.returncode == 0, done.stdout
    assert user.remaining_processes() == []

"""Code that attacks its sandbox does not affect the host, the service or neighboring sandboxes.

The attacks are those of `tests.support.hostile`, run as the user who runs the tests and as an
ordinary user.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sandboxes import (
    ApptainerConfig,
    Bind,
    SandboxConfigError,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
    make_provider,
)
from tests.support.hostile import CHECKS, NothingToAttackError
from tests.support.repeated_starts import RepeatedStarts
from tests.support.users.as_user import OrdinaryUser, ordinary_user

pytestmark = [pytest.mark.apptainer, pytest.mark.slow(seconds=60)]
NAMES = list(CHECKS)
AT_A_TIME = 5
"""Attacks in one process of the ordinary user, whose start takes as long as an attack."""


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    provider = RepeatedStarts(ApptainerConfig(), tmp_path)
    yield provider
    await provider.close()


@pytest.fixture
async def apptainer(tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    provider = make_provider(ApptainerConfig(reuse_setups=False), tmp_path)
    yield provider
    await provider.close()


@pytest.fixture(scope="module")
def user() -> Iterator[OrdinaryUser]:
    with ordinary_user() as user:
        yield user


@pytest.mark.parametrize("name", CHECKS)
async def test_attack(provider, name):
    with suppress(NothingToAttackError):
        await CHECKS[name](provider)


@pytest.mark.extended("sandboxes/")
@pytest.mark.parametrize("name", CHECKS)
async def test_attack_where_apptainer_starts_each(apptainer, name):
    with suppress(NothingToAttackError):
        await CHECKS[name](apptainer)


@pytest.mark.extended("sandboxes/")
@pytest.mark.parametrize("first", range(0, len(NAMES), AT_A_TIME), ids=NAMES[::AT_A_TIME])
def test_attacks_as_an_ordinary_user(user, first):
    names = NAMES[first : first + AT_A_TIME]
    done = user.run(["python", "-m", "tests.support.hostile", *names], timeout=170)
    assert done.returncode == 0, done.stdout
    assert user.remaining_processes() == []


async def test_binds_are_read_and_cannot_be_changed(provider, tmp_path):
    shared = tmp_path / "shared"  # below folders that the sandbox's user cannot enter
    shared.mkdir()
    (shared / "data").write_text("given")
    spec = SandboxSpec(read_only_binds=[Bind(str(shared), "/data"), Bind(str(shared / "data"), "/one")])
    async with await provider.start(spec) as sandbox:
        assert await sandbox.read_file("/data/data") == b"given"
        assert await sandbox.read_file("/one") == b"given"
        for path in ("/data/data", "/data/new", "/one"):
            with pytest.raises(SandboxError):
                await sandbox.write_file(path, "changed")
    with pytest.raises(SandboxConfigError):
        await provider.start(SandboxSpec(read_only_binds=[Bind("/etc:/etc", "/x")]))

"""Real sandboxes are paused with real control groups, by root and by a user who has one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandboxes import SandboxSpec
from sandboxes.conformance import pausing
from sandboxes.conformance.expectations import checks_in
from sandboxes.limits.cgroups import CGROUPS, find_control_groups
from tests.support.users.as_user import OrdinaryUser, ordinary_user

pytestmark = pytest.mark.apptainer
JOIN = """
until grep -q "$1" /proc/self/cgroup; do sleep 0.05; done
shift
exec "$@"
"""


ASK = """
from pathlib import Path
from sandboxes import ApptainerConfig, make_provider
print(make_provider(ApptainerConfig(), Path.home() / "state").pausing)
"""


@contextmanager
def delegated(uid: int) -> Iterator[Path | None]:
    """Make a group beside version 1 in which a user may make others; None on a host that has no such place."""
    freezer = find_control_groups().paths_of("").get("freezer")
    if os.geteuid() != 0 or freezer is None or not freezer.is_relative_to(CGROUPS / "unified"):
        yield None
        return
    group = freezer.parent / f"rollout-tests-{os.getpid()}"
    group.mkdir()
    try:
        for path in (group, group / "cgroup.procs"):
            os.chown(path, uid, uid)
        yield group
        assert list(group.glob("rollout-*")) == []
    finally:
        group.rmdir()


def said_in(group: Path | None, user: OrdinaryUser, command: list[str]) -> str:
    """Return what a user's command says that runs in a control group."""
    if group is None:
        return user.run(command, timeout=200).stdout
    process = user.start(["sh", "-c", JOIN, "join", group.name, *command])
    (group / "cgroup.procs").write_text(str(process.pid))
    return process.communicate(timeout=200)[0]


@pytest.mark.timeout(480)
@pytest.mark.slow(seconds=40)
def test_a_user_with_a_group_of_its_own_pauses_sandboxes():
    names = [f"--check={check.__name__}" for check in checks_in(pausing)]
    with ordinary_user() as user, delegated(user.uid) as group:
        if group is not None:
            assert said_in(group, user, ["python", "-c", ASK]) == "processes\n"
        said = said_in(group, user, ["python", "-m", "sandboxes.conformance", "apptainer", *names])
        assert f"{len(names)} checks, 0 failed" in said, said
        assert user.remaining_processes() == []


async def test_a_sandbox_whose_owner_listens_is_not_paused(provider):
    async with await provider.start(SandboxSpec(listens=True)) as sandbox:
        assert not await sandbox.pause()


async def test_memory_that_caches_files_is_given_back(provider):
    if provider.pausing in ("files", "memory"):
        async with await provider.start(SandboxSpec()) as sandbox:
            await sandbox.python()
            assert await sandbox.pause()
            assert await sandbox.reclaim() > 0
            assert (await (await sandbox.python()).execute("1 + 1")).result == "2"
            assert await sandbox.reclaim() == 0, "it runs"

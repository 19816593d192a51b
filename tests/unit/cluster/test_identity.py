"""A service is known by its host, boot and process, and takes only rollouts that its node can run."""

import errno
import os
import subprocess
import sys
from dataclasses import replace
from socket import gethostname
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.cluster import identity, membership
from rollout_service.cluster.identity import ServiceIdentity, is_gone
from rollout_service.cluster.membership import IMAGE_WAIT_SECONDS, Placement
from rollout_service.environments.contract import Environment, EnvironmentSpec, SandboxSettings
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.store.cluster_contract import Heartbeat
from sandboxes.errors import ImageNotFoundError

TELL = """
import sys
from rollout_service.cluster.identity import ServiceIdentity
print(ServiceIdentity.create(), flush=True)
sys.stdin.read()
"""

identities = st.builds(
    ServiceIdentity,
    host=st.text(),
    boot=st.uuids().map(str),
    pid_namespace=st.integers(0, 2**32),
    pid=st.integers(1, 2**22),
    started=st.integers(0, 2**63),
    service=st.integers(0, 2**48 - 1).map(lambda number: f"{number:012x}"),
)


class OtherService:
    """Another process, with its own identity."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.owner = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def other():
    service = OtherService()
    yield service
    service.kill()


@given(identities)
def test_an_identity_survives_its_text(identity):
    assert ServiceIdentity.parse(str(identity)) == identity


@given(st.text() | identities.map(str).flatmap(lambda text: st.sampled_from([text[1:], text + "0", "0" + text])))
def test_nothing_else_parses(text):
    try:
        identity = ServiceIdentity.parse(text)
    except ValueError:
        assert not is_gone(text)
    else:
        assert str(identity) == text


def test_two_services_of_one_process_differ():
    first, second = ServiceIdentity.create(), ServiceIdentity.create()
    assert first != second
    assert (first.pid, first.started) == (second.pid, second.started)
    assert not first.is_gone()
    assert not is_gone(str(second))


def test_a_live_service_on_this_host_is_not_gone_and_a_killed_one_is(other):
    mine, theirs = ServiceIdentity.create(), ServiceIdentity.parse(other.owner)
    assert theirs.host == mine.host == gethostname()
    assert theirs.boot == mine.boot
    assert theirs.pid != os.getpid()
    assert not is_gone(other.owner)
    other.kill()
    assert is_gone(other.owner)


def test_a_process_that_was_not_waited_for_is_gone(other):
    other.process.kill()
    os.waitid(os.P_PID, other.process.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(other.owner)


def test_a_process_id_that_is_used_again_is_another_process():
    mine = ServiceIdentity.create()
    assert replace(mine, started=mine.started - 1).is_gone()


def test_a_live_service_of_another_user_whom_proc_hides_is_not_gone(monkeypatch):
    def refuse(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), 0)
        raise PermissionError

    theirs = ServiceIdentity.create()
    monkeypatch.setattr(identity, "start_time", lambda _: None)
    monkeypatch.setattr(identity.os, "kill", refuse)
    assert not theirs.is_gone()


def test_a_service_that_cannot_be_seen_is_not_taken_for_dead(other):
    other.kill()
    theirs = ServiceIdentity.parse(other.owner)
    assert not replace(theirs, boot="00000000-0000-4000-8000-000000000000").is_gone(), "another machine"
    assert not replace(theirs, pid_namespace=theirs.pid_namespace + 1).is_gone(), "another container"
    assert not is_gone(f"{gethostname()}-0123456789abcdef"), "an owner that is no identity"


class Plain(Environment):
    def __init__(self, name, requires=()):
        self.spec = EnvironmentSpec(name=name, image=name, sandbox=SandboxSettings(requires=requires))

    async def run(self, episode):
        raise NotImplementedError

    async def evaluate(self, episode):
        raise NotImplementedError


class Images:
    """Says of the images that are not in `here` that they are missing."""

    def __init__(self, *here):
        self.here = set(here)

    async def check(self, spec):
        if spec.image not in self.here:
            raise ImageNotFoundError(f"there is no image {spec.image!r}")


@pytest.fixture
def clock(monkeypatch):
    """Move the clock with `clock(seconds)`."""
    now = [1_000.0]
    monkeypatch.setattr(membership, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def move(seconds):
        now[0] += seconds

    return move


def node_with(images, *environments, labels=()):
    return Placement(EnvironmentRegistry(environments), images, labels)


def others_have(**images):
    return Heartbeat(is_member=True, images=images)


async def test_a_rollout_is_left_to_the_nodes_with_its_image_however_long_they_are_busy(clock):
    node = node_with(Images("calc"), Plain("calc"), Plain("code"))
    await node.look()
    for _ in range(5):
        assert node.waits(others_have(calc=1, code=1)) == {"calc": 0.0}
        clock(IMAGE_WAIT_SECONDS)


async def test_a_rollout_without_an_image_anywhere_waits_for_a_node_to_come_back_and_is_then_taken(clock):
    node = node_with(Images(), Plain("code"))
    assert node.waits(others_have(code=1)) == {}
    clock(IMAGE_WAIT_SECONDS - 1)
    assert node.waits(others_have(code=0)) == {}, "the node may return"
    clock(1)
    assert node.waits(others_have(code=0)) == {"code": IMAGE_WAIT_SECONDS}, "to fail, which says what is missing"
    assert node.waits(others_have(code=1)) == {}


async def test_an_image_that_is_built_meanwhile_is_found(clock):
    images = Images()
    node = node_with(images, Plain("code"))
    await node.look()
    images.here.add("code")
    await node.look()
    assert node.waits(others_have(code=1)) == {"code": 0.0}


async def test_a_shared_folder_of_images_that_fails_for_a_moment_changes_nothing():
    images = Images("calc")
    node = node_with(images, Plain("calc"), Plain("code"))
    await node.look()

    async def fail(spec):
        raise OSError(errno.ESTALE, "Stale file handle")

    images.check = fail
    await node.look()
    assert node.images == ["calc"]


async def test_a_rollout_is_never_taken_by_a_node_without_its_labels(clock):
    tuned = Plain("tuned", requires=("gpu", "fast"))
    images = Images("tuned", "calc")
    for labels, found in (((), {"calc"}), (("gpu",), {"calc"}), (("fast", "gpu", "x"), {"calc", "tuned"})):
        node = node_with(images, Plain("calc"), tuned, labels=labels)
        await node.look()
        assert node.waits(others_have()) == dict.fromkeys(found, 0.0)
        assert set(node.images) == found

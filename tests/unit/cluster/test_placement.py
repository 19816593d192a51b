"""Which rollouts a node claims: those whose labels it has, and whose image is here or nowhere."""

from types import SimpleNamespace

import pytest

from rollout_service.cluster import placement
from rollout_service.cluster.placement import IMAGE_WAIT_SECONDS, LOOK_SECONDS, Placement
from rollout_service.environments.contract import Environment, EnvironmentSpec, SandboxSettings
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.store.cluster_contract import Heartbeat
from sandboxes.errors import ImageNotFoundError


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
    monkeypatch.setattr(placement, "time", SimpleNamespace(monotonic=lambda: now[0]))

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
    assert node.waits(others_have(code=0)) == {"code": IMAGE_WAIT_SECONDS}, (
        "to fail, which says what is missing"
    )
    assert node.waits(others_have(code=1)) == {}


async def test_an_image_that_is_built_meanwhile_is_found(clock):
    images = Images()
    node = node_with(images, Plain("code"))
    await node.look()
    images.here.add("code")
    await node.look()
    assert node.images == [], "a provider may have to ask a daemon for each"
    clock(LOOK_SECONDS)
    await node.look()
    assert node.waits(others_have(code=1)) == {"code": 0.0}


async def test_a_rollout_is_never_taken_by_a_node_without_its_labels(clock):
    tuned = Plain("tuned", requires=("gpu", "fast"))
    images = Images("tuned", "calc")
    for labels, found in (((), {"calc"}), (("gpu",), {"calc"}), (("fast", "gpu", "x"), {"calc", "tuned"})):
        node = node_with(images, Plain("calc"), tuned, labels=labels)
        await node.look()
        assert node.waits(others_have()) == dict.fromkeys(found, 0.0)
        assert set(node.images) == found

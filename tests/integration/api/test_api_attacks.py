"""The API withstands every attack, on a server with a key for each role and few file descriptors."""

import json
from collections.abc import Iterator

import pytest

from tests.support.api.attacks import CHECKS, Target, attack
from tests.support.api.server import api_server

KEYS = {role: f"{role}-key-of-enough-characters" for role in ("admin", "read", "submit")}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    keys = json.dumps([{"name": role, "role": role, "key": key} for role, key in KEYS.items()])
    folder = tmp_path_factory.mktemp("server")
    with api_server(folder, before=["prlimit", "--nofile=900:900"], ROLLOUT_KEYS=keys) as server:
        yield Target(server.url, **KEYS)
        assert server.process.poll() is None, server.log
        assert not [role for role, key in KEYS.items() if key in server.log]
        assert "Traceback" not in server.log


def test_there_are_enough():
    assert len(CHECKS) >= 20


@pytest.mark.parametrize("name", CHECKS)
async def test_it_holds(target, name):
    async for outcome in attack(target, [name]):
        assert outcome.held, outcome.why

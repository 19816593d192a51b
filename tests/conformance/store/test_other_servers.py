"""The contract of the store holds in a Redis Cluster and in Valkey too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.store.servers import STORE_SERVER

FOLDER = Path(__file__).parent


@pytest.mark.extended("rollout_service/store/")
@pytest.mark.slow(seconds=120)
@pytest.mark.timeout(600)
@pytest.mark.redis
@pytest.mark.parametrize("server", ["cluster", pytest.param("valkey", marks=pytest.mark.valkey)])
def test_the_contract_holds(server):
    # In a process of its own: all fixtures of a session are made for one server.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "redis", "--tier", "1", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(FOLDER)],
        env=os.environ | {STORE_SERVER: server},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8_000:]

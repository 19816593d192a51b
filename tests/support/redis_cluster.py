"""A real Redis Cluster of three primaries, with a replica of each if a test wants one to fail over."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from rollout_service.store.redis import RedisConfig
from sandboxes.host.ports import free_port
from tests.support.redis_server import RedisServer, redis_server

PRIMARIES = 3
SLOTS = 16_384
SECONDS = 60.0
NODE_TIMEOUT_MS = "1500"
BUS_PORT = "cluster-port"


@dataclass
class RedisCluster:
    """Servers that are a cluster."""

    servers: list[RedisServer]

    def config(self, prefix: str | None = None, **changes: Any) -> RedisConfig:
        """Return the settings of a store, by the address of the first server."""
        return self.servers[0].config(prefix, **changes)

    def owner(self, config: RedisConfig) -> RedisServer:
        """Return the server that has the slot of a store now, as the others see it."""
        for server in self.servers:
            if server.process is not None and server.process.is_running():
                port = self._owner_port(server, self.slot(config))
                return next(one for one in self.servers if one.port == port)
        raise AssertionError("no server of the cluster runs")

    def slot(self, config: RedisConfig) -> int:
        return int(self.servers[-1].do("CLUSTER KEYSLOT", config.root))

    def move(self, config: RedisConfig) -> RedisServer:
        """Move the slot of a store to another server with all its keys; return that."""
        source, slot = self.owner(config), self.slot(config)
        target = next(one for one in self.servers[:PRIMARIES] if one is not source)
        names = {one.port: str(one.do("CLUSTER MYID"), "ascii") for one in (source, target)}
        target.do("CLUSTER SETSLOT", slot, "IMPORTING", names[source.port])
        source.do("CLUSTER SETSLOT", slot, "MIGRATING", names[target.port])
        while keys := source.do("CLUSTER GETKEYSINSLOT", slot, 100):
            source.do("MIGRATE", "127.0.0.1", target.port, "", 0, 10_000, "KEYS", *keys)
        for server in (target, source, *self.servers[:PRIMARIES]):
            server.do("CLUSTER SETSLOT", slot, "NODE", names[target.port])
        return target

    def _owner_port(self, server: RedisServer, slot: int) -> int:
        found = [nodes[0][1] for first, last, *nodes in server.do("CLUSTER SLOTS") if first <= slot <= last]
        return int(found[0])


@contextmanager
def redis_cluster(*, replicas: bool = False) -> Iterator[RedisCluster]:
    """Start a cluster, and end it; with `replicas`, each primary has one."""
    with ExitStack() as stack:
        count = 2 * PRIMARIES if replicas else PRIMARIES
        servers = [stack.enter_context(_cluster_server()) for _ in range(count)]
        cluster = RedisCluster(servers)
        _join(cluster, replicas)
        yield cluster


def _cluster_server() -> AbstractContextManager[RedisServer]:
    options = {"cluster-enabled": "yes", "cluster-node-timeout": NODE_TIMEOUT_MS}
    # By default the bus listens 10,000 above the other port, which may be taken.
    return redis_server(port=free_port(), options={**options, BUS_PORT: str(free_port())})


def _join(cluster: RedisCluster, replicas: bool) -> None:
    primaries, others = cluster.servers[:PRIMARIES], cluster.servers[PRIMARIES:]
    edges = [SLOTS * number // PRIMARIES for number in range(PRIMARIES + 1)]
    for server, first, after in zip(primaries, edges, edges[1:], strict=False):
        server.do("CLUSTER ADDSLOTSRANGE", first, after - 1)
    for server in cluster.servers[1:]:
        cluster.servers[0].do("CLUSTER MEET", "127.0.0.1", server.port, server.options[BUS_PORT])
    _wait(lambda: all(_known(one) == len(cluster.servers) for one in cluster.servers))
    for primary, replica in zip(primaries, others, strict=False):
        replica.do("CLUSTER REPLICATE", str(primary.do("CLUSTER MYID"), "ascii"))
    _wait(lambda: all(_info(one)["cluster_state"] == "ok" for one in cluster.servers))
    if replicas:
        _wait(lambda: all(_replicates(one) for one in others))


def _info(server: RedisServer) -> dict[str, Any]:
    found: dict[str, Any] = server.do("CLUSTER INFO")
    return found


def _known(server: RedisServer) -> int:
    return int(_info(server)["cluster_known_nodes"])


def _replicates(server: RedisServer) -> bool:
    return bool(server.do("INFO", "replication").get("master_link_status") == "up")


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the cluster of Redis did not come up")
        time.sleep(0.05)

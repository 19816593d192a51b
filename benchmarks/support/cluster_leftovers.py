"""What a cluster leaves behind once all its work has ended: it should be nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import anyio
import anyio.to_thread
import redis.asyncio
from support.cluster import NODES, Cluster
from support.network import namespaces

from rollout_service.store.segments.ledger import FILE_NAME

RETENTION_SECONDS = 90.0
"""How long a node has to delete everything: a few passes of its retention."""
END_SECONDS = 5.0
"""How long sandboxes have to end after their service."""
KEEP_NOTHING = {"ended_run_seconds": 0, "settled_group_seconds": 0, "rollout_seconds": 0}
_OF_NODES = (
    *("meta", "events", "members", "places", "heartbeats", "tombstones", "holders", "roles", "leader", "node"),
    *("nodes", "nodes_alive", "owners_dead", "pools", "pool", "backends", "claims", "idle", "woken", "wakes"),
    *("segments:mark", "rollouts:last", "runs:last", "runs:revision"),
)
"""The keys that a store without work has, by their names or what these begin with before a colon."""


async def on_machines(cluster: Cluster) -> list[str]:
    """Return the processes, sandbox folders and mounts that outlive the nodes' services."""
    found = ["unknown"]
    with anyio.move_on_after(END_SECONDS):
        while found := _on_machines(cluster):  # noqa: ASYNC110 - other processes end meanwhile
            await anyio.sleep(0.1)
    return found


def _on_machines(cluster: Cluster) -> list[str]:
    found = []
    for name in NODES:
        machine, run = cluster.machines[name], cluster.folder / f"run-{name}"
        found += [f"{name}: process {process}" for process in machine.processes()]
        found += [f"{name}: mount {line}" for line in machine.mounts() if str(cluster.folder) in line]
        found += [f"{name}: {path}" for path in run.iterdir()] if run.exists() else []
    return found


async def after_retention(cluster: Cluster) -> list[str]:
    """Let a node delete all that has ended; return the keys and the files that remain."""
    await cluster.run(NODES[0], **KEEP_NOTHING)
    found = ["unknown"]
    with anyio.move_on_after(RETENTION_SECONDS):
        while found := await stored(cluster):  # noqa: ASYNC110 - another process deletes it
            await anyio.sleep(0.5)
    await cluster.stop_nodes()
    return found or await stored(cluster)


async def stored(cluster: Cluster) -> list[str]:
    """Return the keys of rollouts and runs in the Redis, and the segment files."""
    names: list[str] = []
    for url in cluster.redis_urls:
        async with redis.asyncio.Redis.from_url(url) as client:
            names += [key.decode() async for key in client.scan_iter(count=1_000)]
    found = [f"key {key}" for name in names if is_of_work(key := name.partition(":")[2])]
    if cluster.needs_objects:
        files: Iterable[str] = await anyio.to_thread.run_sync(cluster.objects.objects, cluster.objects_address)
    else:
        files = (path.name for path in (cluster.folder / "shared").rglob("*"))
    return found + [f"file {name}" for name in files if FILE_NAME.search(name)]


def is_of_work(key: str) -> bool:
    """Whether a key is of rollouts or runs, as every key is that is not known to be of nodes and engines."""
    return key not in _OF_NODES and key.partition(":")[0] not in _OF_NODES


async def after_all(cluster: Cluster) -> list[str]:
    """Return the mounts below the folder and the processes in the networks that outlive the machines."""
    found = ["unknown"]
    with anyio.move_on_after(END_SECONDS):
        while found := _outside(cluster):  # noqa: ASYNC110 - other processes end meanwhile
            await anyio.sleep(0.1)
    for pin in cluster.networks.values():
        os.close(pin)
    return found


def _outside(cluster: Cluster) -> list[str]:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found = [f"network {one}" for one in sorted(namespaces() & cluster.networks.keys())]
    return found + [f"mount {line}" for line in mounts if str(cluster.folder) in line]

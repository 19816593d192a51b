"""The nodes that share a store of several shards.

Every node is a member in each shard, so each gives back the leases there of a node that died, whatever the others do. A
name is taken, and a node's state decided, in the home shard; the others follow it with the next heartbeat. Roles here
are those of the home shard, for the work that concerns all nodes; runs are managed by the roles of their own shard.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from api_schemas.nodes import NodeState
from rollout_service.base.errors import ConflictError, NotFoundError, StoreError
from rollout_service.store.cluster_contract import (
    ClusterStore,
    Heartbeat,
    NameTakenError,
    NodeRecord,
    NodeReport,
    RoleLease,
)
from rollout_service.store.sharded.shard import Shard, ask_each

T = TypeVar("T")


class ShardedCluster(ClusterStore):
    is_shared = True

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._home, *self._others = shards
        self.rejoined = 0
        """How often this node lost its leases in single shards."""

    async def join(self, report: NodeReport, *, replacing: str | None = None) -> None:
        """Join each shard that answers; the others follow with a heartbeat."""

        async def join(shard: Shard) -> None:
            await shard.store.cluster.join(report, replacing=replacing)

        home = await ask_each([self._home], join)  # first, so that of two nodes one gets the name everywhere
        others = await ask_each(self._others, join)
        if not home.found:
            others.some()

    async def heartbeat(self, report: NodeReport) -> Heartbeat:
        """Return what the first shard that answers says of all nodes.

        Where alone the node is no member, it joins again; the leases there are lost, which `rejoined` tells.
        """
        answers = await ask_each(self._shards, lambda shard: shard.store.cluster.heartbeat(report))
        beats = {n: beat for n, beat in sorted(answers.found.items()) if beat.is_member}
        if not beats:
            answers.some()
            return Heartbeat(is_member=False)
        first = next(iter(beats.values()))
        for number in answers.found.keys() - beats.keys():
            await self._rejoin(self._shards[number], report)
        await self._follow(report.name, first.state, beats)
        return replace(first, dead=sorted({name for beat in beats.values() for name in beat.dead}))

    async def _rejoin(self, shard: Shard, report: NodeReport) -> None:
        self.rejoined += 1  # before it can claim there what it still works on
        with suppress(StoreError, NameTakenError):  # the next heartbeat tries again
            await shard.ask(partial(shard.store.cluster.join, report))

    async def _follow(self, name: str, state: NodeState, beats: Mapping[int, Heartbeat]) -> None:
        """Bring the node's state to the shards that missed a command."""
        behind = [self._shards[number] for number, beat in beats.items() if beat.state is not state]
        await self._each_that_can(behind, lambda shard: shard.store.cluster.change_state(name, state))

    async def _each_that_can(self, shards: Sequence[Shard], call: Callable[[Shard], Awaitable[None]]) -> None:
        for shard in shards:
            with suppress(StoreError, NotFoundError, ConflictError):
                await shard.ask(partial(call, shard))

    async def leave(self, owner: str) -> None:
        (await ask_each(self._shards, lambda shard: shard.store.cluster.leave(owner))).whole()

    async def nodes(self) -> Sequence[NodeRecord]:
        answers = await ask_each(self._shards, lambda shard: shard.store.cluster.nodes())
        return answers.some()[0]

    async def change_state(self, name: str, state: NodeState) -> None:
        await self._home.ask(partial(self._home.store.cluster.change_state, name, state))
        await self._each_that_can(self._others, lambda shard: shard.store.cluster.change_state(name, state))

    async def remove(self, name: str) -> None:
        await self._home.ask(partial(self._home.store.cluster.remove, name))
        await self._each_that_can(self._others, lambda shard: shard.store.cluster.remove(name))

    async def wait_for_change(self, after: int) -> int:
        return await self._home.store.cluster.wait_for_change(after)

    async def lead(self, role: str, owner: str) -> RoleLease | None:
        return await self._home.store.cluster.lead(role, owner)

    async def wait_for_role(self, role: str) -> None:
        await self._home.store.cluster.wait_for_role(role)

    async def resign(self, role: str, owner: str) -> None:
        await self._home.store.cluster.resign(role, owner)

    async def leader(self, role: str) -> RoleLease | None:
        return await self._home.store.cluster.leader(role)

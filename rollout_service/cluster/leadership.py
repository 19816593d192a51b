"""Work that only one node may do at a time: each kind of such work is a role with one leader.

The work runs only while this node holds the role, is cancelled before the role can pass to another node, and gets a
lease whose token lets the store refuse the writes of an earlier leader. A leader that leaves resigns, so another one
begins at once; one that dies is followed `LEADER_SECONDS` after it renewed its lease last.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import structlog

from rollout_service.base.errors import StoreError
from rollout_service.store.cluster_contract import HEARTBEAT_SECONDS, LEADER_SECONDS, ClusterStore, RoleLease
from rollout_service.store.retrying import retry_until_stored

log = structlog.get_logger(__name__)

RUNS_ROLE = "runs"
RETENTION_ROLE = "retention"

Work = Callable[[RoleLease], Coroutine[Any, Any, None]]
"""Runs until it is cancelled; must end promptly then."""
_RESIGN_SECONDS = 1.0


class Leadership:
    def __init__(self, cluster: ClusterStore, owner: str) -> None:
        self._cluster = cluster
        self._owner = owner
        self.leases: dict[str, RoleLease] = {}
        """The roles that this node leads now."""

    @asynccontextmanager
    async def leading(self, roles: dict[str, Work]) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            for role, work in roles.items():
                tasks.start_soon(self.lead, role, work)
            yield
            tasks.cancel_scope.cancel()

    async def lead(self, role: str, work: Work) -> None:
        try:
            while True:
                asked = anyio.current_time()
                lease = await retry_until_stored(f"lead {role}", partial(self._cluster.lead, role, self._owner))
                if lease is None:
                    await self._cluster.wait_for_role(role)
                elif anyio.current_time() < asked + LEADER_SECONDS:
                    await self._work(lease, asked + LEADER_SECONDS, work)
        finally:
            with anyio.move_on_after(_RESIGN_SECONDS, shield=True), suppress(StoreError):
                await self._cluster.resign(role, self._owner)

    async def _work(self, lease: RoleLease, until: float, work: Work) -> None:
        """Work until the role is lost, or could pass to another node since the store does not answer."""
        self.leases[lease.role] = lease
        log.info("this node leads", role=lease.role, token=lease.token)
        try:
            with anyio.CancelScope(deadline=until) as held:  # `work` ends in time though the store may hang
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(work, lease)
                    tasks.start_soon(self._renew, lease, held)
        finally:
            del self.leases[lease.role]
        log.warning("this node no longer leads", role=lease.role)

    async def _renew(self, lease: RoleLease, held: anyio.CancelScope) -> None:
        """Cancel the scope once another node leads."""
        while True:
            await anyio.sleep(HEARTBEAT_SECONDS)
            asked = anyio.current_time()
            try:
                renewed = await self._cluster.lead(lease.role, self._owner)
            except StoreError as error:
                log.debug("the lead cannot be renewed; trying again", role=lease.role, error=str(error))
                continue
            if renewed != lease:
                held.cancel()
                return
            held.deadline = asked + LEADER_SECONDS

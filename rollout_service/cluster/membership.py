"""This node's membership in the cluster that shares its store, and which rollouts suit it.

- A node joins before it claims anything, and leaves after it has handed everything back.
- Within a heartbeat of a command to drain or to resume, the node follows it.
- A node that was declared dead, for example since it was stopped for a while, drops all its work before it joins again.
- A store that fails ends neither the membership nor the work under way, and a provider that hangs delays no heartbeat.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
import structlog

from api_schemas.nodes import NodeState, NodeView
from rollout_service.base.errors import StoreError
from rollout_service.cluster.identity import is_gone
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.store.cluster_contract import (
    DEAD_SECONDS,
    HEARTBEAT_SECONDS,
    ClusterStore,
    Heartbeat,
    NameTakenError,
    NodeRecord,
    NodeReport,
    unknown_node,
)
from rollout_service.store.retrying import retry_until_stored
from sandboxes.errors import SandboxError

log = structlog.get_logger(__name__)

LEAVE_SECONDS = 2.0
"""How long the end of a service waits for a store that does not answer; the other nodes then find it dead."""


class Membership:
    def __init__(
        self,
        cluster: ClusterStore,
        report: Callable[[], NodeReport],
        *,
        look: Callable[[], Awaitable[None]],
        on_beat: Callable[[Heartbeat], None],
        drop_work: Callable[[], Awaitable[None]],
    ) -> None:
        """`look` brings up to date what takes long to find out of the report; `drop_work` cancels the rollouts under
        way, whose leases are lost, and waits until they have ended.
        """
        self._cluster = cluster
        self._report = report
        self._look = look
        self._on_beat = on_beat
        self._drop_work = drop_work
        self._drains_again = False
        """It has to drain, as before it was declared dead, and the store does not know that yet."""
        self.beat = Heartbeat(is_member=False)

    @property
    def state(self) -> NodeState:
        return self.beat.state

    @property
    def _gather_seconds(self) -> float:
        """How long to gather changes before a heartbeat: they come in bursts, and each costs one of every node."""
        return HEARTBEAT_SECONDS * min(1.0, max(0.05, sum(self.beat.states.values()) / 200))

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[None]:
        """
        Raises:
            NameTakenError: Another live node has this node's name.
            StoreError: The store failed.
        """
        await self._look()
        report = self._report()
        await self._join(report)
        try:
            await self._beat_once()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._work)
                tasks.start_soon(self._keep_looking)
                yield
                tasks.cancel_scope.cancel()
        finally:
            with anyio.move_on_after(LEAVE_SECONDS, shield=True), suppress(StoreError):
                await self._cluster.leave(report.owner)

    async def _join(self, report: NodeReport) -> None:
        """Replace a holder of the name that has crashed, at once if that can be seen from here."""
        deadline = time.monotonic() + DEAD_SECONDS + HEARTBEAT_SECONDS
        silent = 0.0
        while True:
            try:
                await self._cluster.join(report)
            except NameTakenError as error:
                if is_gone(error.holder):
                    await self._cluster.join(report, replacing=error.holder)
                    return
                holder = await self._holder(report.name)
                has_reported = holder is not None and holder.silent_seconds < silent
                if has_reported or time.monotonic() > deadline:
                    raise
                silent = holder.silent_seconds if holder else silent
                log.info("waiting to see whether the node of this name is alive", node=report.name)
                await anyio.sleep(HEARTBEAT_SECONDS / 2)
            else:
                return

    async def _holder(self, name: str) -> NodeRecord | None:
        return next((node for node in await self._cluster.nodes() if node.report.name == name), None)

    async def _keep_looking(self) -> None:
        """Look apart from the heartbeats: a provider that takes long must not make this node seem dead."""
        while True:
            await anyio.sleep(LOOK_SECONDS)
            await self._look()

    async def _work(self) -> None:
        seen = 0
        while True:
            with anyio.move_on_after(HEARTBEAT_SECONDS):
                seen = await self._cluster.wait_for_change(seen)
                await anyio.sleep(self._gather_seconds)
            await retry_until_stored("report this node", self._beat_once)

    async def _beat_once(self) -> None:
        beat = await self._cluster.heartbeat(self._report())
        if not beat.is_member:
            beat = await self._rejoin()
        if self._drains_again:
            await self._cluster.change_state(self._report().name, NodeState.DRAINING)
            self._drains_again = False
            beat = await self._cluster.heartbeat(self._report())
        for name in beat.dead:
            log.warning("a node is dead; its rollouts were queued again", node=name)
        if beat.state is not self.beat.state and self.beat.is_member:
            log.info("this node changed its state", state=beat.state.value)
        self.beat = beat
        self._on_beat(beat)

    async def _rejoin(self) -> Heartbeat:
        """Drop the work of lost leases and join again; a drain goes on."""
        log.warning(
            "this node was declared dead and its rollouts were given to others; it drops them and joins again",
            hint="It was stopped, or could not reach the store, for longer than 10 seconds.",
        )
        self._drains_again = self.beat.state is NodeState.DRAINING
        await self._drop_work()
        report = self._report()
        await self._cluster.join(report)
        return await self._cluster.heartbeat(report)


@dataclass(frozen=True, slots=True)
class ClusterNodes:
    """All nodes, and the commands that reach them through the store within a heartbeat.

    This node's own figures are those of this moment, other nodes' those of their last heartbeat.

    A command raises `NotFoundError` if no node has this name, and `ConflictError` if the node is dead or, to be
    removed, is not.
    """

    cluster: ClusterStore
    own: Callable[[], NodeReport]

    async def list(self) -> list[NodeView]:
        """Return all nodes by name, with dead ones until they are removed."""
        own = self.own()
        views = [_view(record, own) for record in await self.cluster.nodes()]
        return views or [NodeView.model_validate_json(own.view)]

    async def get(self, name: str) -> NodeView:
        for view in await self.list():
            if view.node == name:
                return view
        raise unknown_node(name)

    async def drain(self, name: str) -> NodeView:
        """Let the node claim no more rollouts; those under way continue."""
        await self.cluster.change_state(name, NodeState.DRAINING)
        return await self.get(name)

    async def resume(self, name: str) -> NodeView:
        await self.cluster.change_state(name, NodeState.READY)
        return await self.get(name)

    async def remove(self, name: str) -> None:
        await self.cluster.remove(name)


_FIGURES = ("rollouts", "places", "live", "in_use", "warm", "waiting", "target")
_NOTHING: dict[str, object] = dict.fromkeys(_FIGURES, 0) | {"stages": [], "holds": [], "pressure": None}
"""A dead node does, holds and takes nothing, whatever its last heartbeat said."""


def _view(record: NodeRecord, own: NodeReport) -> NodeView:
    report = own if record.report.owner == own.owner else record.report
    view = NodeView.model_validate_json(report.view)
    now = {"state": record.state, "silent_seconds": round(max(0.0, record.silent_seconds), 3)}
    return view.model_copy(update=now | (_NOTHING if record.state is NodeState.DEAD else {}))


IMAGE_WAIT_SECONDS = 180.0
"""Slurm holds a requeued job for two minutes."""

LOOK_SECONDS = 30.0
"""A provider may have to ask a daemon for each image."""


@dataclass(slots=True)
class Placement:
    """The environments that suit this node: those whose labels it has, and whose image is here.

    A rollout is never claimed by a node that lacks its image while another node has it, however busy that one is. If no
    node has the image, the rollout waits `IMAGE_WAIT_SECONDS` for one that does, such as one that was preempted; then
    any node takes it, and its failure says what is missing.
    """

    environments: EnvironmentRegistry
    sandboxes: SandboxSource
    labels: Sequence[str] = ()
    images: Sequence[str] = ()
    """Environments whose image was here when it was last looked for, or that need none."""
    _seen: dict[str, float] = field(default_factory=dict)
    """When a node last had the image of each environment."""

    @property
    def suited(self) -> list[str]:
        return [one.spec.name for one in self.environments.list() if not self.missing_labels(one.spec)]

    def missing_labels(self, spec: EnvironmentSpec) -> list[str]:
        return sorted(set(spec.sandbox.requires) - set(self.labels))

    async def look(self) -> None:
        """Look for the images of all environments."""
        specs = [one.spec for one in self.environments.list() if not self.missing_labels(one.spec)]
        self.images = [spec.name for spec in specs if await self._has_image(spec)]

    async def _has_image(self, spec: EnvironmentSpec) -> bool:
        try:
            await self.sandboxes.check(spec)
        except SandboxError:
            return False
        except OSError as error:  # a shared folder of images may fail for a moment
            log.warning("an image cannot be looked for", environment=spec.name, error=str(error))
            return spec.name in self.images
        return True

    def waits(self, beat: Heartbeat) -> Mapping[str, float]:
        """Return the environments whose rollouts this node takes, and how many seconds these must have waited."""
        now = time.monotonic()
        self._seen.update({name: now for name, nodes in beat.images.items() if nodes > 0})
        lately = {name for name, seen in self._seen.items() if now - seen < IMAGE_WAIT_SECONDS}
        here = set(self.images)
        takes = [name for name in self.suited if name in here or name not in lately]
        return {name: 0.0 if name in here else IMAGE_WAIT_SECONDS for name in takes}

"""Follows a job that runs, and adds and ends the jobs of its further nodes.

Only jobs that this submitted for the same first job are ended, never the first one. Slurm, or nodes, that do not answer
are asked again, and nothing is decided meanwhile. Once the first job is over, the others end too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from api_schemas.nodes import NodeState, NodeView
from api_schemas.views.overview import NextNode
from rollout_client.client import ClientError, RolloutClient
from rollout_service.base.errors import ConfigurationError
from rollout_service.cluster.slurm import commands
from rollout_service.cluster.slurm.commands import QueuedJob
from rollout_service.cluster.slurm.folder import JobFolder, Published, Submitted, joined_name
from rollout_service.cluster.slurm.scaling import (
    ActionKind,
    AddedNode,
    NodesDoNotStartError,
    ScaleAction,
    ScaleInput,
    ScaleOptions,
    Scaling,
)
from rollout_service.cluster.slurm.spec import JobSpec, render

T = TypeVar("T")
ANSWER_SECONDS = 10.0
_INHERITED = {
    *("time", "account", "qos", "signal_seconds", "backends"),
    *("flags", "config", "images_dir", "scratch", "python"),
}
"""Inherited from the first job's specification, unless others are given."""


def spec_of_more(home: JobFolder, resources: Mapping[str, Any], changes: Mapping[str, Any]) -> JobSpec:
    """Return the specification of the jobs that add a node each to a job; their names end with their numbers.

    None stands for the first job's value, except for GPUs and options of sbatch, which a node without engines does not
    need.

    Raises:
        ValueError: A value is not valid.
    """
    first = home.load().spec
    given = {name: value for name, value in changes.items() if value is not None}
    own = first.resources.model_dump(include={"partition", "cpus", "memory"})
    own |= {name: value for name, value in resources.items() if value is not None}
    inherited = first.model_dump(include=_INHERITED)
    return JobSpec.model_validate(
        inherited | given | {"name": f"{first.name}-more", "join": home.path, "resources": own}
    )


@dataclass
class Scaler:
    home: JobFolder
    spec: JobSpec
    """The specification of the jobs of more nodes; its name is the part before their numbers."""
    options: ScaleOptions
    tell: Callable[[str], None]
    """Tells a person what is done, and why."""
    interval_seconds: float = 15.0
    scaling: Scaling = field(init=False)

    def __post_init__(self) -> None:
        self.scaling = Scaling(self.options)

    async def run(self) -> None:
        """
        Raises:
            NodesDoNotStartError: Starts of nodes have failed too often in a row.
        """
        while True:
            try:
                if self._is_removed() or (await commands.job_state(self.home.load().job)).is_over:
                    await self._end_all()
                    return
                if (seen := await self._look()) is not None:
                    await self._do(self.scaling.decide(seen), seen.now)
            except NodesDoNotStartError:
                raise
            except (ConfigurationError, OSError) as error:
                self.tell(f"this is tried again in {self.interval_seconds:g} s: {error}")
            await anyio.sleep(self.interval_seconds)

    def _is_removed(self) -> bool:
        """Return whether the job's folder is gone, as after `stop --remove`, and not its whole file system."""
        return self.home.path.parent.exists() and not self.home.path.exists()

    def folder(self, slot: int) -> JobFolder:
        return JobFolder(self.home.path.parent / f"{self.spec.name}-{slot}")

    async def _look(self) -> ScaleInput | None:
        """Read the queue of Slurm and the nodes; return None if no node answers."""
        jobs = await commands.queued_jobs(self.home.more_script)
        folders = [self.home, *(self.folder(job.index) for job in jobs)]
        parts = [part for folder in folders for part in folder.published("nodes")]
        overview = await self._ask(parts, lambda client: client.overview())
        if overview is None:
            return None
        added = [await self._added_node(job, overview.nodes) for job in jobs]
        await self._forget_dead(overview.nodes, added)
        answer = overview.next_node or NextNode(message="The nodes do not say what they wait for.")
        return ScaleInput(anyio.current_time(), answer, added)

    async def _ask(self, parts: Sequence[Published], call: Callable[[RolloutClient], Awaitable[T]]) -> T | None:
        """Return the first answer of these nodes; None if there is none."""
        for part in parts:
            with anyio.move_on_after(ANSWER_SECONDS), suppress(ClientError):
                async with RolloutClient(part.url, self.home.key, patience_seconds=0) as client:
                    return await call(client)
        return None

    async def _added_node(self, job: QueuedJob, nodes: Sequence[NodeView]) -> AddedNode:
        ours = [one for one in nodes if self._is_in(job.index, one) and one.state is not NodeState.DEAD]
        if not ours or not job.is_running:
            return AddedNode(job)
        [node, *_] = ours
        return AddedNode(job, node.node, node.state, node.rollouts or await self._holds(job.index, node))

    def _is_in(self, slot: int, node: NodeView) -> bool:
        return node.node.endswith(f"{self.spec.name}-{slot}")

    async def _holds(self, slot: int, node: NodeView) -> int:
        """Ask a node what it holds; one that does not answer may hold something."""
        job, listed = f"{self.spec.name}-{slot}", self.folder(slot).published("nodes")
        parts = [part for part in listed if joined_name(part.name, job) == node.node]
        own = await self._ask(parts, lambda client: client.overview())
        if own is None:
            return 1
        return own.sessions_open + sum(one.rollouts for one in own.nodes if one.node == node.node)

    async def _forget_dead(self, nodes: Sequence[NodeView], added: Sequence[AddedNode]) -> None:
        """Remove nodes that were killed, unless a job is to bring them back."""
        slots = set(range(1, self.options.most + 1)) - {each.slot for each in added if not each.is_alive}
        for node in nodes:
            if node.state is NodeState.DEAD and any(self._is_in(slot, node) for slot in slots):
                await self._remove(node.node)

    async def _remove(self, node: str) -> None:
        await self._ask(self.home.published("nodes"), lambda client: client.remove_node(node))

    async def _do(self, actions: Sequence[ScaleAction], now: float) -> None:
        """Carry out actions; those that fail are tried again after a later look."""
        for action in actions:
            if action.kind is not ActionKind.SUBMIT:
                self.tell(f"{action.kind} {self.spec.name}-{action.slot} (job {action.job}): {action.why}")
                await self._do_one(action)
        new = [action for action in actions if action.kind is ActionKind.SUBMIT]
        if new:
            await self._submit([action.slot for action in new], new[0].why, now)

    async def _do_one(self, action: ScaleAction) -> None:
        match action.kind:
            case ActionKind.DRAIN:
                await self._ask(self.home.published("nodes"), lambda client: client.drain_node(action.node))
            case ActionKind.END:
                await commands.end(action.job)
            case _:
                await commands.cancel(action.job)

    async def _submit(self, slots: Sequence[int], why: str, now: float) -> None:
        specs = {slot: self.spec.model_copy(update={"name": f"{self.spec.name}-{slot}"}) for slot in slots}
        for slot, spec in specs.items():
            folder = self.folder(slot)
            folder.create(self.home.key)
            folder.forget("nodes")  # left by an earlier job, which was killed
            folder.save(Submitted(job="", spec=spec))
        self.home.more_script.write_text(render(self.spec, self.home.path.parent / self.spec.name, slots=slots))
        try:
            array = await commands.submit(self.home.more_script)
        except ConfigurationError as error:
            self.tell(f"Slurm refuses more nodes: {error}")
            self.scaling.start_failed(now, f"Slurm said: {error}")
            return
        for slot, spec in specs.items():
            self.folder(slot).save(Submitted(job=f"{array}_{slot}", spec=spec))
        self.scaling.submitted({f"{array}_{slot}": slot for slot in slots})
        names = ", ".join(spec.name for spec in specs.values())
        self.tell(f"submit {names} (job {array}): {why}")

    async def _end_all(self) -> None:
        self.tell(f"job {self.home.path.name} is over")
        await commands.end_array(
            self.home.more_script, lambda job: self.tell(f"end {self.spec.name}-{job.index} (job {job.job})")
        )

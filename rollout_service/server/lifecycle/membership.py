"""Makes a service a member of the cluster that shares its store, and gives it its roles there.

The pipeline claims only rollouts that suit this node, and none while it drains; each run manager knows the places of
all nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from api_schemas.nodes import NodeState
from rollout_service.base.errors import InvalidFieldError
from rollout_service.cluster.membership import ClusterNodes, Membership, Placement
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.pipeline.context import AttemptContext
from rollout_service.pipeline.pipeline import Pipeline
from rollout_service.pipeline.settlement import ClaimRules
from rollout_service.runs import RunManager
from rollout_service.server.lifecycle.foundation import Foundation
from rollout_service.server.overview.stages import stage_overviews
from rollout_service.store.cluster_contract import Heartbeat, NodeReport


@dataclass(slots=True)
class ClusterMember:
    foundation: Foundation
    context: AttemptContext
    placement: Placement
    claims: ClaimRules
    pipeline: Pipeline
    managers: Sequence[RunManager]
    """One for each shard."""

    def manager_of(self, run_id: str) -> RunManager:
        """Return the manager of a run, which may be yet to be created."""
        return self.managers[self.foundation.store.shard_of(run_id)]

    def membership(self) -> Membership:
        return Membership(
            self.foundation.store.cluster,
            self.report,
            look=self.placement.look,
            on_beat=self._follow,
            drop_work=self.pipeline.drop_all,
        )

    def nodes(self) -> ClusterNodes:
        return ClusterNodes(self.foundation.store.cluster, self.report)

    def report(self) -> NodeReport:
        foundation, stages = self.foundation, self.context.stages
        before = (stages.init, stages.rollout)  # what is evaluated needs no place
        figures = {
            "address": foundation.settings.address,
            "labels": list(self.placement.labels),
            "environments": self.placement.suited,
            "images": list(self.placement.images),
            "rollouts": self.pipeline.live(),
            "finished": self.pipeline.finished,
            "places": sum(each.places.size + each.workers.size for each in before),
            "stages": stage_overviews(stages, self.context.activities),
            "state": NodeState.READY if self.claims.is_open else NodeState.DRAINING,
        }
        view = foundation.node.view().model_copy(update=figures)
        return NodeReport(
            name=view.node,
            owner=foundation.owner,
            address=view.address,
            labels=view.labels,
            environments=view.environments,
            images=view.images,
            places=view.places,
            view=view.model_dump_json(),
        )

    def _follow(self, beat: Heartbeat) -> None:
        self.claims.open(beat.state is NodeState.READY)
        if self.foundation.store.cluster.is_shared:
            self.claims.suit(self.placement.waits(beat))
        elif len(self.placement.suited) < len(self.placement.environments.list()):
            self.claims.suit(dict.fromkeys(self.placement.suited, 0.0))
        for manager in self.managers:
            manager.resize(beat.places)


@dataclass(frozen=True, slots=True)
class Suitability:
    placement: Placement
    membership: Membership

    def has_image_elsewhere(self, name: str) -> bool:
        return self.membership.beat.images.get(name, 0) > 0

    def runs_elsewhere(self, name: str) -> bool:
        return self.membership.beat.environments.get(name, 0) > 0

    def check(self, spec: EnvironmentSpec) -> None:
        missing = self.placement.missing_labels(spec)
        if missing and not self.runs_elsewhere(spec.name):
            labels = ", ".join(missing)
            raise InvalidFieldError.at(
                "environment",
                f"no node that has it has the labels it requires: {labels}",
                hint="Start a node with `[cluster] labels` that include them, or change `[sandbox] requires`.",
            )

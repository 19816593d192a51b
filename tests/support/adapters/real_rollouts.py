"""Real rollouts for the scripts that real trainers run: from a service, joined to two segments or failed by plan."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from api_schemas.rollouts import Rollout, RolloutRequest
from api_schemas.trajectories import ForkReason
from rollout_client import SyncRolloutClient
from rollout_client.adapters.submit import RolloutSubmitter

POLICY = Path(__file__).parents[3] / "rollout_service" / "engines" / "checkpoints" / "calc-base"
TOO_SHORT_SECONDS = 0.001
"""A deadline for a stage that no rollout can meet."""


def rows(count: int) -> list[dict[str, Any]]:
    """Return tasks of the service's data set."""
    with SyncRolloutClient(os.environ["ROLLOUT_URL"]) as client:
        instances = client.dataset("calc", limit=count)
    return [{"environment": "calc", "instance": instance} for instance in instances]


def policy() -> Any:
    """Return the weights that the service's engine serves, as a model of torch, which not every trainer has."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)


class PlannedSubmitter(RolloutSubmitter):
    """Runs rollouts at the service; those of a task with a plan are joined from two, or fail."""

    def planned(self, plan: Mapping[str, list[str]]) -> PlannedSubmitter:
        """Return it with a plan: for a question, `join` or `fail` for its next attempts, in their order."""
        self.__dict__["plan"] = {question: list(steps) for question, steps in plan.items()}
        self.__dict__["seen"] = defaultdict(list)
        return self

    @property
    def seen(self) -> dict[str, list[Rollout]]:
        """The rollouts of each question, as the service and the plan made them."""
        return self.__dict__["seen"]

    async def run(self, request: RolloutRequest) -> Rollout:
        """Run a rollout as planned."""
        question = str(request.task.instance["question"])
        steps = self.__dict__["plan"].get(question, [])
        step = steps.pop(0) if steps else "plain"
        rollout = await (self._failed(request) if step == "fail" else super().run(request))
        if step == "join":
            again = request.model_copy(update={"rollout_id": f"{request.rollout_id}.other"})
            rollout = joined(rollout, await super().run(again))
        self.seen[question].append(rollout)
        return rollout

    async def _failed(self, request: RolloutRequest) -> Rollout:
        """Run a rollout that misses a deadline; one that ends in the very step in which it is noticed does not fail."""
        limits = request.limits.model_copy(update={"rollout_seconds": TOO_SHORT_SECONDS})
        for attempt in range(10):
            name = f"{request.rollout_id}.short-{attempt}"
            rollout = await super().run(request.model_copy(update={"limits": limits, "rollout_id": name}))
            if rollout.reward is None:
                return rollout
        raise AssertionError("no rollout missed its deadline")


def joined(first: Rollout, second: Rollout) -> Rollout:
    """Return the first rollout with the segments of the second after its own, as after a compaction."""
    one, other = first.trajectory, second.trajectory
    assert one is not None
    assert other is not None
    turns = len(one.finish_reasons)
    later = [
        segment.model_copy(
            update={
                "turn_ids": [turn + turns if turn >= 0 else -1 for turn in segment.turn_ids],
                "fork_reason": ForkReason.COMPACTION,
                "parent": 0,
            }
        )
        for segment in other.segments
    ]
    trajectory = one.model_copy(
        update={
            "segments": [*one.segments, *later],
            "finish_reasons": [*one.finish_reasons, *other.finish_reasons],
        }
    )
    return first.model_copy(update={"trajectory": trajectory})


def sampled_tokens(rollout: Rollout) -> list[tuple[tuple[int, ...], int, float]]:
    """Return each sampled token of a rollout with all ids before it and its log-probability."""
    segments = rollout.trajectory.segments if rollout.trajectory is not None else []
    return [
        (tuple(segment.token_ids[:at]), segment.token_ids[at], segment.logprobs[at])
        for segment in segments
        for at, sampled in enumerate(segment.loss_mask)
        if sampled
    ]


def centered(rewards: list[float]) -> list[float]:
    """Return rewards less their mean, computed apart from any trainer."""
    return [reward - sum(rewards) / len(rewards) for reward in rewards]

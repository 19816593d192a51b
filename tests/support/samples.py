"""Small rollouts and their parts, for tests in which only a few of their fields matter."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from api_schemas.inference import BackendState, BackendView
from api_schemas.rollouts import Rollout, RolloutState
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, ForkReason, Message, Segment, Trajectory
from rollout_service.engines.contract import Generation
from rollout_service.tokens import check_invariants

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def segment(ids: list[int], mask: list[int] | None = None, **columns: Any) -> Segment:
    """Return a segment; the tokens of the mask, by default all, were sampled in turn 0 at version 3."""
    mask = [1] * len(ids) if mask is None else mask
    given: dict[str, Any] = {
        "token_ids": ids,
        "loss_mask": mask,
        "logprobs": [-0.5 if one else 0.0 for one in mask],
        "versions": [3 if one else -1 for one in mask],
        "turn_ids": [one - 1 for one in mask],
        "fork_reason": ForkReason.FIRST,
    }
    return Segment(**(given | columns))


def trajectory(*segments: Segment, messages: Sequence[Message] = (), turns: int = 1) -> Trajectory:
    """Return a trajectory whose turns stopped by themselves."""
    return Trajectory(
        segments=list(segments),
        messages=list(messages),
        finish_reasons=[FinishReason.STOP] * turns,
        fork_counts={ForkReason.FIRST: 1},
    )


def sampled_by_turn(trajectory: Trajectory) -> dict[int, list[int]]:
    """Return the sampled ids of each turn."""
    found: dict[int, list[int]] = {}
    for one in trajectory.segments:
        for token, mask, turn in zip(one.token_ids, one.loss_mask, one.turn_ids, strict=True):
            if mask:
                found.setdefault(turn, []).append(token)
    return found


def sampled_of_one(trajectory: Trajectory) -> tuple[list[int], list[int]]:
    """Return the sampled ids of a trajectory of one segment, and their versions."""
    check_invariants(trajectory)
    [only] = trajectory.segments
    kept = [place for place, mask in enumerate(only.loss_mask) if mask]
    return [only.token_ids[place] for place in kept], [only.versions[place] for place in kept]


def rollout(rollout_id: str = "r", state: RolloutState = RolloutState.COMPLETED, **fields: Any) -> Rollout:
    given = {"task": Task(environment="calc"), "pool": "policy", "created_at": NOW}
    return Rollout(rollout_id=rollout_id, state=state, **(given | fields))


def generation(ids: list[int], **fields: Any) -> Generation:
    """Return an engine's whole answer, sampled at version 1."""
    given: dict[str, Any] = {
        "output_ids": ids,
        "logprobs": [-0.5] * len(ids),
        "versions": [1] * len(ids),
        "finish_reason": FinishReason.STOP,
        "prompt_tokens": 1,
        "cached_tokens": 0,
        "backend_id": "b",
        "engine_seconds": 0.0,
    }
    return Generation(**(given | fields))


def backend_view(backend_id: str, **fields: Any) -> BackendView:
    """Return an engine in service that has done nothing yet."""
    given: dict[str, Any] = {
        "url": "http://gpu-1:30000",
        "pool": "policy",
        "state": BackendState.READY,
        "model_path": "/m",
        "tokenizer_path": "/m",
        "weight_version": 0,
        "context_length": 1,
        "in_flight": 0,
        "served": 0,
        "failures": 0,
    }
    return BackendView(backend_id=backend_id, **(given | fields))

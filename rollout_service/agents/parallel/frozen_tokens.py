"""The tokens of sub-agents, as they may be exported: none of them is to be trained on."""

from __future__ import annotations

from api_schemas.trajectories import Segment, Trajectory


def versions_of(trajectory: Trajectory) -> list[int]:
    """Return the versions that sampled tokens, in ascending order."""
    return sorted(
        {
            version
            for segment in trajectory.segments
            for version, sampled in zip(segment.versions, segment.loss_mask, strict=True)
            if sampled
        }
    )


def frozen(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory in which no token has mask 1, nor anything that only such tokens have."""
    return trajectory.model_copy(update={"segments": [_frozen(segment) for segment in trajectory.segments]})


def _frozen(segment: Segment) -> Segment:
    length = len(segment.token_ids)
    return segment.model_copy(
        update={
            "loss_mask": [0] * length,
            "logprobs": [0.0] * length,
            "versions": [-1] * length,
            "turn_ids": [-1] * length,
        }
    )

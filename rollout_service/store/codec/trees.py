"""The sub-agents of a stored rollout.

Their descriptions are part of the rollout's result, compressed; their trajectories are in the record of its tokens, so
that they are pruned together. Guarantees: reading returns the tree that was written, to the last bit. No token of a
frozen sub-agent is stored as one to train on.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import zstandard
from pydantic import TypeAdapter

from api_schemas.rollouts import Rollout, RolloutRequest
from api_schemas.rollouts.trees import AgentNode, NodeDetail
from api_schemas.trajectories import Segment, Trajectory
from rollout_service.base.errors import DefectError
from rollout_service.store.codec import record
from rollout_service.store.codec import trajectories as trajectory_codec

_NODES = TypeAdapter(list[AgentNode])
_WITHOUT_TRAJECTORY = {"__all__": {"trajectory"}}
_LEVEL = 1


class FrozenTokensError(DefectError):
    """A frozen sub-agent has tokens to train on, so its rollout is not stored as a sample."""

    code = "frozen_tokens"


def check_frozen(nodes: Sequence[AgentNode]) -> None:
    """Check that no token of a frozen sub-agent is to be trained on.

    Raises:
        FrozenTokensError: There is such a token.
    """
    for node in nodes:
        if node.trainable or node.trajectory is None:
            continue
        if any(any(segment.loss_mask) for segment in _segments(node.trajectory)):
            raise FrozenTokensError(
                f"the sub-agent {node.node_id} is frozen, but its trajectory has tokens to train on",
                hint="This is a bug in the service or in a plug-in: the loss mask of a frozen sub-agent is all zeros.",
            )


def encode(nodes: Sequence[AgentNode]) -> str:
    """Return the descriptions of sub-agents, without their trajectories, as text."""
    text = _NODES.dump_json(list(nodes), exclude=_WITHOUT_TRAJECTORY)
    return base64.b64encode(zstandard.ZstdCompressor(level=_LEVEL).compress(text)).decode()


def decode(text: str) -> list[AgentNode]:
    """Return the sub-agents that `encode` wrote."""
    return _NODES.validate_json(zstandard.ZstdDecompressor().decompress(base64.b64decode(text)))


def encode_tokens(rollout: Rollout, request: RolloutRequest) -> bytes | None:
    """Return the trajectories of a rollout, and of its sub-agents if asked for, as one record.

    None stands for a rollout without a trajectory of its own.
    """
    if rollout.trajectory is None:
        return None
    others = (node.trajectory for node in _recorded(rollout, request))
    return record.join(
        trajectory_codec.encode(rollout.trajectory),
        [b"" if one is None else trajectory_codec.encode(one) for one in others],
    )


def count_tokens(rollout: Rollout, request: RolloutRequest) -> int:
    """Return the number of tokens that `encode_tokens` encodes, to which its cost is proportional."""
    trajectories = (rollout.trajectory, *(node.trajectory for node in _recorded(rollout, request)))
    return sum(len(segment.token_ids) for one in trajectories if one for segment in _segments(one))


def _recorded(rollout: Rollout, request: RolloutRequest) -> Sequence[AgentNode]:
    """Return the sub-agents whose trajectories are to be stored."""
    return rollout.nodes if request.exports.nodes is NodeDetail.TOKENS else ()


def with_trajectories(nodes: Sequence[AgentNode], tokens: bytes | None) -> list[AgentNode]:
    """Return sub-agents with their trajectories, if the record of the rollout's tokens has any."""
    packed = None if tokens is None else record.other_parts(tokens)
    if packed is None:
        return list(nodes)
    return [
        node.model_copy(update={"trajectory": trajectory_codec.decode(data)}) if data else node
        for node, data in zip(nodes, packed, strict=True)
    ]


def _segments(trajectory: Trajectory) -> Sequence[Segment]:
    return (*trajectory.segments, *trajectory.untrained)

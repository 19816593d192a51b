"""Rollouts, leases and events as stored records.

A rollout's result is stored without the facts that the store keeps elsewhere (the request's fields, the state, the
attempt, the retries, the times), so each fact has one place. Sub-agents and the marks of turns are compressed parts of
the result, without the trajectories, which are in the record of the rollout's tokens, so that they are pruned together.
Reading returns what was written, to the last bit. Decoding a damaged record raises RecordLostError, which names its
rollout.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum, auto
from itertools import compress
from typing import Any

import anyio.to_thread
import zstandard
from pydantic import TypeAdapter

from api_schemas.errors import ErrorInfo
from api_schemas.events import Event
from api_schemas.rollouts import Rollout, RolloutPage, RolloutRequest, RolloutState, Span, StopReason
from api_schemas.rollouts.sessions import TurnMark
from api_schemas.rollouts.trees import AgentNode, NodeDetail, RolloutNodes
from api_schemas.trajectories import Segment, Trajectory
from rollout_service.base.errors import DefectError, RecordLostError
from rollout_service.store.codec import record
from rollout_service.store.codec import trajectories as trajectory_codec
from rollout_service.store.codec.record import Row
from rollout_service.store.contract import Lease

_RETRIES = TypeAdapter(list[ErrorInfo])
_SPANS = TypeAdapter(list[Span])
_UNREADABLE = (ValueError, KeyError, TypeError, zstandard.ZstdError, struct.error)
RESTORE = "Restore a backup of the store and resume the run, or end the run."
_RESULT_FIELDS = {
    "reward",
    "reward_parts",
    "notes",
    "stop_reason",
    "program",
    "error",
    "usage",
    "spans",
    "work",
    "kind",
    "session",
}


_INLINE_TOKENS = 2_048
"""The most tokens that are encoded on the event loop, which takes about 1 ms."""
_IMPERSONAL_FIELDS = {"stop_reason", "error", "usage", "spans", "kind"}


def when(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@contextmanager
def reading(rollout_id: str) -> Iterator[None]:
    """Turn the errors of decoding a damaged record into RecordLostError."""
    try:
        yield
    except _UNREADABLE as error:
        why = f"the record of the rollout {rollout_id} cannot be read: {type(error).__name__}"
        raise RecordLostError(why, hint=RESTORE) from error


def encode_result(result: Rollout) -> str:
    """Return the part of a result that the store does not keep elsewhere, as JSON."""
    check_frozen(result.nodes)
    text = result.model_dump_json(include=_RESULT_FIELDS)
    if result.nodes:
        text = f'{text[:-1]},"nodes":"{encode(result.nodes)}"}}'
    if result.turn_marks:
        text = f'{text[:-1]},"turn_marks":"{encode_turn_marks(result.turn_marks)}"}}'
    return text


async def encode_finished(lease: Lease, result: Rollout) -> tuple[str, bytes | None]:
    """Return the result of a leased rollout and the record of its tokens, if it has one; large ones take a thread.

    Raises:
        ValueError: It is not a result of this rollout.
        FrozenTokensError: A frozen sub-agent has tokens to train on.
    """
    if not result.state.terminal or result.rollout_id != lease.rollout_id:
        raise ValueError(
            f"{result.rollout_id} in state {result.state} is not a result of the leased {lease.rollout_id}"
        )
    if result.nodes:
        text = await anyio.to_thread.run_sync(encode_result, result)
    else:
        text = encode_result(result)
    if count_tokens(result, lease.request) <= _INLINE_TOKENS:
        return text, encode_tokens(result, lease.request)
    return text, await anyio.to_thread.run_sync(encode_tokens, result, lease.request)


def erase_result(text: str) -> str:
    """Return a stored result without the rollout's contents: its tokens, texts, score, and whose it was."""
    result = json.loads(text)
    return json.dumps({name: value for name, value in result.items() if name in _IMPERSONAL_FIELDS})


def encode_failure(error: ErrorInfo) -> str:
    """Encode the failure of a rollout that could not be read."""
    return json.dumps({"error": error.model_dump(mode="json")})


def version_range(trajectory: Trajectory | None) -> dict[str, int | None]:
    """Return the oldest and the newest version of the tokens to train on; None for both if there are none."""
    pairs = ((s.versions, s.loss_mask) for s in (trajectory.segments if trajectory else []))
    sampled = {version for versions, mask in pairs for version in set(compress(versions, mask))}
    return {"oldest_version": min(sampled, default=None), "newest_version": max(sampled, default=None)}


class Shown(Enum):
    """How much of its sub-agents, and of the marks of its turns, to return with a rollout."""

    ALL = auto()
    """Everything but the trajectories of sub-agents."""
    REQUESTED = auto()
    """The exports that its request asks for, except for the trajectories of sub-agents."""
    WORK = auto()
    """If its request asks for them, how the work was divided among sub-agents, and its session."""


def decode_rollout(row: Row, shown: Shown = Shown.REQUESTED) -> Rollout:
    """Return a rollout from its row, joined with its request and, if there is one, its result."""
    with reading(row["rollout_id"]):
        return _decode_rollout(row, shown)


def make_page(rows: Sequence[Row], limit: int, counts: dict[RolloutState, int]) -> RolloutPage:
    """Return a page of rollouts from their rows, of which there is one more if another page follows."""
    return RolloutPage(
        rollouts=[decode_rollout(row, Shown.WORK) for row in rows[:limit]],
        next_cursor=str(rows[limit - 1]["seq"]) if len(rows) > limit else None,
        counts=counts,
    )


def decode_tree(row: Row) -> RolloutNodes | None:
    """Return the sub-agents of a rollout, with their trajectories if the row has the record of its tokens."""
    if row["result"] is None:
        return None
    with reading(row["rollout_id"]):
        result = json.loads(row["result"])
        nodes = decode(result["nodes"]) if "nodes" in result else []
        return RolloutNodes(
            rollout_id=row["rollout_id"],
            nodes=with_trajectories(nodes, row["trajectory"]),
            work=result.get("work"),
        )


def _decode_rollout(row: Row, shown: Shown) -> Rollout:
    request = RolloutRequest.model_validate_json(row["request"])
    state = RolloutState(row["state"])
    result: dict[str, Any] = json.loads(row["result"] or "{}")
    result.setdefault("spans", json.loads(row["spans"]))
    nodes = result.pop("nodes", None)
    if request.exports.nodes is NodeDetail.NONE and shown is not Shown.ALL:
        result.pop("work", None)
    elif nodes is not None and shown is not Shown.WORK:
        result["nodes"] = decode(nodes)
    marks = result.pop("turn_marks", None)
    if not request.exports.turn_marks and shown is not Shown.ALL:
        result.pop("kind", None)
        result.pop("session", None)
    elif marks is not None and shown is not Shown.WORK:
        result["turn_marks"] = _MARKS.validate_json(_unpacked(marks))
    if state is RolloutState.CANCELLED:
        result.setdefault("stop_reason", StopReason.CANCELLED)
    return Rollout(
        rollout_id=row["rollout_id"],
        state=state,
        task=request.task,
        pool=request.pool,
        branch_of=request.branch_of,
        metadata=request.metadata,
        attempt=row["attempt"],
        retries=_RETRIES.validate_json(row["retries"]),
        created_at=when(row["created_at"]),
        # The clock may have been set between two starts of a service.
        finished_at=when(max(row["changed_at"], row["created_at"])) if state.terminal else None,
        **result,
    )


def encode_spans(spans: Sequence[Span]) -> str:
    return _SPANS.dump_json(list(spans)).decode()


def decode_lease(row: Row) -> Lease:
    """Return a lease from a claimed row, joined with its request."""
    with reading(row["rollout_id"]):
        return Lease(
            rollout_id=row["rollout_id"],
            request=RolloutRequest.model_validate_json(row["request"]),
            attempt=row["attempt"] + 1,
            retries=_RETRIES.validate_json(row["retries"]),
            spans=_SPANS.validate_json(row["spans"]),
            created_at=when(row["created_at"]),
            queued_seconds=max(0.0, row["changed_at"] - row["queued_at"]),  # it changes when it is claimed
            token=row["token"],
            saved_turns=row["saved_turns"],
            run_id=row["run_id"],
            group=row["group_number"],
        )


def decode_event(row: Row) -> Event:
    return Event(
        event_id=row["event_id"],
        time=when(row["time"]),
        kind=row["kind"],
        subject=row["subject"],
        data=json.loads(row["data"]),
    )


_MARKS = TypeAdapter(list[TurnMark])
_LEVEL = 1


def _packed(text: bytes) -> str:
    return base64.b64encode(zstandard.ZstdCompressor(level=_LEVEL).compress(text)).decode()


def _unpacked(text: str) -> bytes:
    return zstandard.ZstdDecompressor().decompress(base64.b64decode(text))


def encode_turn_marks(marks: Sequence[TurnMark]) -> str:
    return _packed(_MARKS.dump_json(list(marks)))


_NODES = TypeAdapter(list[AgentNode])
_WITHOUT_TRAJECTORY = {"__all__": {"trajectory"}}


class FrozenTokensError(DefectError):
    """A frozen sub-agent has tokens to train on, so its rollout is not stored as a sample."""

    code = "frozen_tokens"


def check_frozen(nodes: Sequence[AgentNode]) -> None:
    """
    Raises:
        FrozenTokensError: A token of a frozen sub-agent is to be trained on.
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
    return _packed(_NODES.dump_json(list(nodes), exclude=_WITHOUT_TRAJECTORY))


def decode(text: str) -> list[AgentNode]:
    return _NODES.validate_json(_unpacked(text))


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
    """Count the tokens that `encode_tokens` encodes; its cost is proportional to that."""
    trajectories = (rollout.trajectory, *(node.trajectory for node in _recorded(rollout, request)))
    return sum(len(segment.token_ids) for one in trajectories if one for segment in _segments(one))


def _recorded(rollout: Rollout, request: RolloutRequest) -> Sequence[AgentNode]:
    return rollout.nodes if request.exports.nodes is NodeDetail.TOKENS else ()


def with_trajectories(nodes: Sequence[AgentNode], tokens: bytes | None) -> list[AgentNode]:
    packed = None if tokens is None else record.other_parts(tokens)
    if packed is None:
        return list(nodes)
    return [
        node.model_copy(update={"trajectory": trajectory_codec.decode(data)}) if data else node
        for node, data in zip(nodes, packed, strict=True)
    ]


def _segments(trajectory: Trajectory) -> Sequence[Segment]:
    return (*trajectory.segments, *trajectory.untrained)

"""Reads of the rollouts of runs, which the store keeps elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from api_schemas.rollouts import RolloutState
from rollout_service.store.redis.runs.records import Command
from rollout_service.store.runs_contract import GroupMember


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A rollout without its request, result and trajectory."""

    state: RolloutState
    reward: float | None
    changed_seconds: float
    """How long ago it changed its state, by Redis's clock."""
    oldest_version: int | None
    newest_version: int | None
    trajectory_bytes: int
    """The size of the encoded trajectory; 0 without one."""
    is_erased: bool

    def member(self, sample: int, rollout_id: str, *, is_straggler: bool) -> GroupMember:
        """Return the rollout as a member of a group."""
        return GroupMember(
            sample=sample,
            rollout_id=rollout_id,
            state=self.state,
            reward=self.reward,
            rolling_seconds=self.changed_seconds if self.state is RolloutState.ROLLOUT else None,
            oldest_version=self.oldest_version,
            newest_version=self.newest_version,
            is_straggler=is_straggler,
            is_erased=self.is_erased,
        )


_FIELDS = ("s", "w", "H", "v", "V", "B", "Y")
"""The fields of a rollout's hash that a member has, as `rollouts.lua` names them."""


def member_read(root: str, rollout_id: str) -> Command:
    """Return the command that reads a member."""
    return ("HMGET", f"{root}:r:{rollout_id}", *_FIELDS)


def erased_read(root: str, rollout_id: str) -> Command:
    """Return the command that reads whether a rollout was erased: `1`, or nothing."""
    return ("HGET", f"{root}:r:{rollout_id}", "Y")


def result_read(root: str, rollout_id: str) -> Command:
    """Return the command that reads a rollout's stored result and the record of its trajectory."""
    return ("MGET", f"{root}:x:{rollout_id}", f"{root}:t:{rollout_id}")


def decode_member(reply: Sequence[bytes | None], now: float) -> MemberRecord | None:
    """Return a member from the reply to that command at this time of Redis's; None if the rollout is gone."""
    state, reward, changed_at, oldest, newest, size, erased = reply
    if state is None or changed_at is None:
        return None
    return MemberRecord(
        state=RolloutState(state.decode()),
        reward=None if reward is None else float(reward),
        changed_seconds=now - float(changed_at),
        oldest_version=None if oldest is None else int(oldest),
        newest_version=None if newest is None else int(newest),
        trajectory_bytes=int(size or 0),
        is_erased=erased is not None,
    )

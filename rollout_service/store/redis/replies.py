"""Replies of the functions on rollouts, as the records that the codecs read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api_schemas.rollouts import RolloutState

STATES = (
    RolloutState.QUEUED,
    RolloutState.INIT,
    RolloutState.ROLLOUT,
    RolloutState.EVALUATE,
    RolloutState.COMPLETED,
    RolloutState.FAILED,
    RolloutState.CANCELLED,
)
"""The order in which the functions count."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A stored rollout: its fields by the names that the codecs use, and those of the queue."""

    fields: Mapping[str, Any]

    def __getitem__(self, name: str, /) -> Any:
        return self.fields[name]

    def with_trajectory(self, data: bytes | None) -> RolloutRow:
        """Return the row with its encoded trajectory, if it has one, in place of its record in Redis."""
        return RolloutRow({**self.fields, "trajectory": data})


def decode_row(reply: Sequence[Any]) -> RolloutRow:
    """Return the row of a reply of `rollouts.row`, with its trajectory if the reply has one."""
    rollout_id, flat, request, result, retries, spans, turns, *rest = reply
    pairs = iter(flat)
    found = {name.decode(): value for name, value in zip(pairs, pairs, strict=True)}
    return RolloutRow(
        {
            "rollout_id": rollout_id.decode(),
            "seq": int(found["n"]),
            "state": found["s"].decode(),
            "attempt": int(found["a"]),
            "token": int(found["t"]),
            "reward": _number(found.get("w")),
            "code": _text(found.get("k")),
            "created_at": float(found["C"]),
            "queued_at": float(found["Q"]),
            "changed_at": float(found["H"]),
            "oldest_version": _whole(found.get("v")),
            "newest_version": _whole(found.get("V")),
            "trajectory_bytes": _whole(found.get("B")) or 0,
            "request": _text(request) or "",
            "result": _text(result),
            "retries": f"[{_text(retries) or ''}]",
            "spans": _text(spans) or "[]",
            "saved_turns": turns,
            "run_id": _text(found.get("R")),
            "group_number": _whole(found.get("G")),
            "trajectory": rest[0] if rest else None,
        }
    )


def decode_counts(reply: Sequence[int]) -> dict[RolloutState, int]:
    return {state: count for state, count in zip(STATES, reply, strict=True) if count}


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _number(value: bytes | None) -> float | None:
    return None if value is None else float(value)


def _whole(value: bytes | None) -> int | None:
    return None if value is None else int(value)

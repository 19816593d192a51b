"""Replies of the functions on rollouts, as the records that the codecs read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


RolloutRow = dict[str, Any]
"""A stored rollout: its fields by the names that the codecs use, and those of the queue."""

FIELDS: Mapping[str, tuple[str, Callable[[bytes], Any]]] = {
    "seq": ("n", int),
    "state": ("s", bytes.decode),
    "attempt": ("a", int),
    "token": ("t", int),
    "pool": ("p", bytes.decode),
    "environment": ("e", bytes.decode),
    "reward": ("w", float),
    "stop_reason": ("S", bytes.decode),
    "code": ("k", bytes.decode),
    "created_at": ("C", float),
    "queued_at": ("Q", float),
    "changed_at": ("H", float),
    "oldest_version": ("v", int),
    "newest_version": ("V", int),
    "run_id": ("R", bytes.decode),
    "group_number": ("G", int),
    "turns": ("T", int),
    "tokens": ("N", int),
    "worked": ("W", float),
    "branch_of": ("b", bytes.decode),
    "is_erased": ("Y", bool),
}
"""The fields of a rollout's hash: their names there, as in `rollouts.lua`, and how they are read."""


def decode_row(reply: Sequence[Any]) -> RolloutRow:
    """Read a reply of `rollouts.row` in `rollouts.lua`."""
    rollout_id, flat, request, result, retries, spans, turns, *rest = reply
    pairs = iter(flat)
    found = {name.decode(): value for name, value in zip(pairs, pairs, strict=True)}
    row = {name: read(found[key]) if key in found else None for name, (key, read) in FIELDS.items()}
    return row | {
        "rollout_id": rollout_id.decode(),
        "request": _text(request) or "",
        "result": _text(result),
        "retries": f"[{_text(retries) or ''}]",
        "spans": _text(spans) or "[]",
        "saved_turns": turns,
        "trajectory": rest[0] if rest else None,
    }


def decode_fields(names: Iterable[str], values: Sequence[bytes | None]) -> RolloutRow:
    pairs = zip(names, values, strict=True)
    return {name: None if value is None else FIELDS[name][1](value) for name, value in pairs}


def decode_counts(reply: Sequence[int]) -> dict[RolloutState, int]:
    return {state: count for state, count in zip(STATES, reply, strict=True) if count}


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()

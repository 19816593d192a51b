"""One change of a run: what to write if nobody else has changed the run since it was read.

The events and counts of a change belong to it, so that no code path can forget them. Only the fields that changed are
written, and a run that is over never changes its state. Groups and batches that are
settled never change again, since their records leave the keys that changes start from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Self, TypeVar

from pydantic import JsonValue

from api_schemas.rollouts import RolloutRequest
from api_schemas.runs import RunRequest, RunState
from rollout_service.base.ids import BatchId, GroupId
from rollout_service.store import rules
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.codec.record import fingerprint
from rollout_service.store.redis.runs.records import (
    BatchRecord,
    ClosedRecord,
    Command,
    GroupStatus,
    OpenRecord,
    RunKeys,
    WaitingGroup,
    Word,
    all_runs,
)
from rollout_service.store.rules import BatchState
from rollout_service.store.runs_contract import GroupClosure, RunRecord

T = TypeVar("T")

TASKS_AT_ONCE = 1_000
"""The most tasks in one command, since a command in a function has at most some thousand words."""
_COUNTER = "n:"
_INTEGERS = ("version", "first_version", "tasks", "cursor", "batches", "held_bytes")
_TIMES = ("created_at", "changed_at", "settled_at")


class RunDraft:
    """The fields of a run's hash, as text, with the changes of a transaction."""

    def __init__(self, run_id: str, fields: Mapping[str, str]) -> None:
        self.run_id = run_id
        self._before = fields
        self._fields = dict(fields)

    @classmethod
    def from_reply(cls, run_id: str, reply: Sequence[bytes]) -> Self | None:
        pairs = zip(reply[::2], reply[1::2], strict=True)
        fields = {name.decode(): value.decode() for name, value in pairs}
        return cls(run_id, fields) if fields else None

    @classmethod
    def create(cls, run_id: str, fields: Mapping[str, Any]) -> Self:
        draft = cls(run_id, {})
        draft.set(cursor=0, batches=0, held_bytes=0, settled_at=0.0, reported="{}")
        draft.set(**fields)
        return draft

    def __getitem__(self, name: str) -> Any:
        """Give the field its type, as the codecs read it."""
        if name == "run_id":
            return self.run_id
        text = self._fields.get(name)
        if text is None:
            return None
        if name in _INTEGERS or name == "total":
            return int(text)
        return float(text) if name in _TIMES else text

    def set(self, **fields: Any) -> None:
        """Change fields; None removes one."""
        for name, value in fields.items():
            if value is None:
                self._fields.pop(name, None)
            else:
                self._fields[name] = repr(value) if isinstance(value, float) else str(value)

    def count(self, name: str, added: int = 1) -> None:
        left = int(self._fields.get(_COUNTER + name, 0)) + added
        self.set(**{_COUNTER + name: left or None})

    @property
    def revision(self) -> str:
        """The revision that was read; empty for a run that is not stored yet."""
        return self._before.get("revision", "")

    @property
    def reported(self) -> dict[str, int]:
        """The counts of dropped groups that the latest batch reported."""
        return dict(json.loads(self["reported"]))

    @property
    def record(self) -> RunRecord:
        counters = {
            name.removeprefix(_COUNTER): int(value) for name, value in self._fields.items() if name.startswith(_COUNTER)
        }
        return run_codec.decode_run(self, counters, request=_request(self._fields["request"]))

    @property
    def is_active(self) -> bool:
        """Whether the run still needs work: it is not over, or groups of it are open."""
        return RunState(self["state"]) not in rules.OVER or self._fields.get(f"{_COUNTER}open") is not None

    @property
    def was_active(self) -> bool:
        return bool(self._before) and RunDraft(self.run_id, self._before).is_active

    @property
    def changed_state(self) -> RunState | None:
        return None if self._before.get("state") == self._fields["state"] else RunState(self["state"])

    def written(self) -> list[str]:
        """Return names and values, one after the other."""
        changed = {name: text for name, text in self._fields.items() if self._before.get(name) != text}
        return [part for pair in changed.items() for part in pair]

    def removed(self) -> list[str]:
        return [name for name in self._before if name not in self._fields]


@lru_cache(maxsize=256)
def _request(text: str) -> RunRequest:
    """Parse a request, which nobody changes; that costs more than the rest of the record."""
    return RunRequest.model_validate_json(text)


class RunTransaction:
    def __init__(self, keys: RunKeys, run: RunDraft, now: float) -> None:
        """`now` is in Unix seconds."""
        self.keys = keys
        self.run = run
        self.now = now
        self.commands: list[Command] = []

    def do(self, *command: Word) -> None:
        """Add a command of Redis, or one of the library's: those of `writes` in `runs.lua`."""
        self.commands.append(command)

    def event(self, kind: str, subject: str, data: Mapping[str, JsonValue]) -> None:
        given = {name: value for name, value in data.items() if value is not None}
        self.do("event", kind, subject, json.dumps(given, separators=(",", ":")))

    def touch(self) -> None:
        self.run.set(changed_at=self.now)

    def announce(self) -> None:
        """Tell those who wait of a change that no other event reports."""
        self.event("run.changed", self.keys.run_id, {})

    def finish_if_done(self) -> None:
        if rules.is_finished(self.run.record):
            self.run.set(state=RunState.FINISHED.value)
            self.touch()

    def submit(self, request: RolloutRequest, number: int) -> str:
        """Queue a rollout of a group; return its id."""
        if request.rollout_id is None:
            raise ValueError("set the request's rollout_id before submitting it")
        text = request.model_dump_json()
        of_group = (self.keys.run_id, number)
        self.do("submit", request.rollout_id, fingerprint(request), request.pool, text, *of_group)
        return request.rollout_id

    def move_group(self, number: int, before: str | None, after: GroupStatus) -> None:
        """Record the state of a group and count it; `before` is the counter of its state so far."""
        if before is not None:
            self.run.count(before, -1)
        self.run.count(after.counter)
        self.do("HSET", self.keys.states, number, str(after))

    def settle_group(self, number: int, size: int) -> None:
        """`size` is the bytes of the group's trajectories."""
        self.do("HDEL", self.keys.heads, number)
        self.do("ZADD", self.keys.settled, self.now, number)
        self.do("ZADD", self.keys.held, self.now, number)
        self.run.set(settled_at=self.now, held_bytes=self.run["held_bytes"] + size)

    def write_history(self, closure: GroupClosure) -> None:
        if closure.number < run_codec.MAX_GROUPS:
            record = run_codec.encode_record(closure, version=self.run["version"], now=self.now)
            self.do("SETRANGE", self.keys.history, closure.number * run_codec.SIZE, record)

    def write_reason(self, number: int, reason: str) -> None:
        """Write why a group was dropped after it had passed the filters."""
        if number < run_codec.MAX_GROUPS:
            place = number * run_codec.SIZE + run_codec.REASON_AT
            self.do("SETRANGE", self.keys.history, place, run_codec.encode_reason(reason))

    def wait_for_batch(self, group: WaitingGroup) -> None:
        self.do("HSET", self.keys.ready, group.number, group.encode())

    def group_closed(self, number: int, status: GroupStatus) -> None:
        data: dict[str, JsonValue] = {"run": self.keys.run_id, "state": status.state, "reason": status.reason}
        self.event("group.closed", str(GroupId(self.keys.run_id, number)), data)

    def prune_group(self, number: int, record: ClosedRecord) -> None:
        for rollout_id in record.rollout_ids:
            self.do("forget", rollout_id)
        self._release(number, record)

    def delete_group(self, number: int, record: ClosedRecord, *, is_held: bool) -> None:
        """Delete the rollouts and the record of a settled group; its state stays."""
        for rollout_id in record.rollout_ids:
            self.do("delete", rollout_id)
        self.do("HDEL", self.keys.closed, number)
        self.do("ZREM", self.keys.settled, number)
        if is_held:
            self._release(number, record)

    def _release(self, number: int, record: ClosedRecord) -> None:
        self.do("ZREM", self.keys.held, number)
        self.run.set(held_bytes=self.run["held_bytes"] - record.size)

    def put_batch(self, batch: BatchRecord) -> None:
        self.do("HSET", self.keys.out, batch.number, batch.encode())

    def batch_moved(self, batch: BatchRecord, state: BatchState) -> None:
        data: dict[str, JsonValue] = {"run": self.keys.run_id, "delivery": batch.deliveries}
        self.event(f"batch.{state}", str(BatchId(self.keys.run_id, batch.number)), data)

    def settle_batch(self, batch: BatchRecord, state: BatchState) -> None:
        self.do("HDEL", self.keys.out, batch.number)
        self.do("HSET", self.keys.batches, batch.number, state.value)
        self.batch_moved(batch, state)

    def append_tasks(self, texts: Sequence[str]) -> None:
        for some in chunks(texts, TASKS_AT_ONCE):
            self.do("RPUSH", self.keys.tasks, *some)

    def delete_run(self) -> None:
        self.do("ZREM", all_runs(self.keys.root), self.keys.run_id)
        self.do("UNLINK", *self.keys.all)

    def finish(self) -> list[Command]:
        """Return all commands, with those that the run's own changes need; none if nothing changes."""
        if self.run.changed_state is not None:
            self.event("run.state", self.keys.run_id, {"state": self.run["state"]})
        if self.run.was_active and not self.run.is_active:
            self.do("retire", self.keys.run_id)
        if written := self.run.written():
            self.do("HSET", self.keys.run, *written)
        if removed := self.run.removed():
            self.do("HDEL", self.keys.run, *removed)
        return self.commands


def by_number(reply: Sequence[bytes]) -> dict[int, bytes]:
    """Return the values of a hash by their numbers, in order, from the reply to HGETALL."""
    pairs = ((int(name), value) for name, value in zip(reply[::2], reply[1::2], strict=True))
    return dict(sorted(pairs))


def open_records(reply: Sequence[bytes]) -> dict[int, OpenRecord]:
    return {number: OpenRecord.decode(data) for number, data in by_number(reply).items()}


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Return the items in parts of this size; the last one may be smaller."""
    return (items[first : first + size] for first in range(0, len(items), size))

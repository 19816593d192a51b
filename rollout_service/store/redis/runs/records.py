"""The keys of runs, the records of groups and batches below them, and reads of rollouts, which are kept elsewhere.

The record of a closed group is compressed, since a run keeps all of them: about 0.3 KB for eight samples, not 1.3 KB.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import zstandard

from rollout_service.groups.shares import Owner
from rollout_service.store.codec import runs as run_codec
from rollout_service.store.redis.replies import FIELDS
from rollout_service.store.rules import BatchState
from rollout_service.store.runs_contract import GroupClosure, ReadyGroup

_LEVEL = 1


@dataclass(slots=True)
class OpenRecord:
    epoch: int
    members: list[str]
    """The ids of its present rollouts, by sample."""
    opened_at: float
    earlier: list[str] = field(default_factory=list)
    """Rollouts that were replaced."""
    cut: list[int] = field(default_factory=list)
    """Samples that are being cut off as stragglers."""
    reason: str | None = None
    """Why the group is being cancelled."""

    def encode(self) -> bytes:
        return _json(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class ClosedRecord:
    """A closed group without its state."""

    epoch: int
    members: Sequence[str]
    earlier: Sequence[str]
    cut: Sequence[int]
    samples: str
    summary: str
    size: int
    """Bytes of the encoded trajectories when the group was closed."""
    opened_at: float

    @classmethod
    def close(cls, group: OpenRecord, closure: GroupClosure, *, size: int) -> Self:
        """`size` is in bytes."""
        return cls(
            epoch=group.epoch,
            members=group.members,
            earlier=group.earlier,
            cut=group.cut,
            samples=run_codec.encode_samples(closure.samples),
            summary=run_codec.encode_summary(closure),
            size=size,
            opened_at=group.opened_at,
        )

    @property
    def rollout_ids(self) -> list[str]:
        return [*self.members, *self.earlier]

    def row(self, run_id: str, number: int) -> dict[str, Any]:
        return {
            "run_id": run_id,
            "number": number,
            "epoch": self.epoch,
            "samples": self.samples,
            "summary": self.summary,
        }

    def encode(self) -> bytes:
        return zstandard.ZstdCompressor(level=_LEVEL).compress(_json(asdict(self)))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return cls(**json.loads(zstandard.ZstdDecompressor().decompress(data)))


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """The state of a group; as text `open`, `ready`, `batched:BATCH`, `acknowledged:BATCH` or `dropped:REASON`."""

    state: str
    detail: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        state, _, detail = text.partition(":")
        return cls(state, detail or None)

    def __str__(self) -> str:
        return self.state if self.detail is None else f"{self.state}:{self.detail}"

    @property
    def batch(self) -> int | None:
        in_batch = self.state in ("batched", "acknowledged") and self.detail is not None
        return int(self.detail) if in_batch and self.detail is not None else None

    @property
    def reason(self) -> str | None:
        return self.detail if self.state == "dropped" else None

    @property
    def counter(self) -> str:
        return str(self) if self.state == "dropped" else self.state


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    number: int
    oldest_version: int | None
    size: int
    """Bytes of the encoded trajectories."""

    def ready(self, owners: Sequence[Owner] = ()) -> ReadyGroup:
        return ReadyGroup(self.number, self.oldest_version, owners)

    def encode(self) -> bytes:
        return _json([self.oldest_version, self.size])

    @classmethod
    def decode(cls, number: int, data: bytes) -> Self:
        oldest, size = json.loads(data)
        return cls(number, oldest, size)


@dataclass(slots=True)
class BatchRecord:
    number: int
    state: BatchState
    lease_key: str
    lease_until: float
    deliveries: int
    version: int
    dropped: Mapping[str, int]
    groups: list[WaitingGroup]

    @property
    def oldest_version(self) -> int | None:
        """The lowest version of a token in it; None if no group knows."""
        versions = (group.oldest_version for group in self.groups if group.oldest_version is not None)
        return min(versions, default=None)

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"dropped": json.dumps(self.dropped)}

    def encode(self) -> bytes:
        groups = [[group.number, group.oldest_version, group.size] for group in self.groups]
        return _json(asdict(self) | {"groups": groups})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        fields = json.loads(data)
        fields["state"] = BatchState(fields["state"])
        fields["groups"] = [WaitingGroup(*group) for group in fields["groups"]]
        return cls(**fields)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


Word = str | bytes | int | float
Command = Sequence[Word]


class RunKeys:
    def __init__(self, root: str, run_id: str) -> None:
        self.run_id = run_id
        self.root = root
        self.run = f"{self.root}:run:{self.run_id}"
        """A hash: fields, and counters as `n:<name>`."""
        self.tasks = f"{self.run}:tasks"
        """A list: inline tasks of an epoch."""
        self.open = f"{self.run}:open"
        """A hash: open groups by number."""
        self.closed = f"{self.run}:closed"
        """A hash: closed groups by number, until retention deletes them."""
        self.states = f"{self.run}:states"
        """A hash: states of all groups by number, as `GroupStatus` writes them, so that settling a group rewrites no
        record."""
        self.ready = f"{self.run}:ready"
        """A hash: the facts that a lease needs about waiting groups, by number."""
        self.heads = f"{self.run}:heads"
        """A hash: heads of kept groups by number."""
        self.out = f"{self.run}:out"
        """A hash: leased and returned batches by number."""
        self.batches = f"{self.run}:batches"
        """A hash: states of acknowledged and dissolved batches by number."""
        self.settled = f"{self.run}:settled"
        """A sorted set: settled groups that are not deleted, by the time at which they were settled."""
        self.held = f"{self.run}:held"
        """A sorted set: settled groups that still have trajectories, by the same time."""
        self.history = f"{self.run}:history"
        """A text: records of closed groups in the order of their numbers, as `codec.runs` writes them."""

    @property
    def all(self) -> tuple[str, ...]:
        groups = (self.open, self.closed, self.states, self.ready, self.heads, self.settled, self.held)
        return (self.run, self.tasks, *groups, self.out, self.batches, self.history)


def all_runs(root: str) -> str:
    """Return the key of the sorted set of all runs, oldest first."""
    return f"{root}:runs"


def active_runs(root: str) -> str:
    """Return the key of the sorted set of the runs that still need work, oldest first."""
    return f"{root}:runs:active"


def fields_read(root: str, rollout_id: str, names: Iterable[str]) -> Command:
    """Return the command that reads these of `replies.FIELDS` of a rollout, for `replies.decode_fields`."""
    return ("HMGET", f"{root}:r:{rollout_id}", *(FIELDS[name][0] for name in names))


def erased_read(root: str, rollout_id: str) -> Command:
    """Return the command that reads whether a rollout was erased: `1`, or nothing."""
    return ("HGET", f"{root}:r:{rollout_id}", "Y")


def result_read(root: str, rollout_id: str) -> Command:
    return ("MGET", f"{root}:x:{rollout_id}", f"{root}:t:{rollout_id}")


def size_read(root: str, rollout_id: str) -> Command:
    """Return the command that reads a rollout's state, and the bytes of its encoded trajectory."""
    return ("HMGET", f"{root}:r:{rollout_id}", "s", "B")


_ARRAY = struct.Struct(">BI")
_ARRAY_32, _TEXT_32 = 0xDD, 0xDB


def pack(commands: Sequence[Command]) -> bytes:
    """Encode commands in MessagePack as one argument, since a function takes only some thousand arguments."""
    parts = [_ARRAY.pack(_ARRAY_32, len(commands))]
    for command in commands:
        parts.append(_ARRAY.pack(_ARRAY_32, len(command)))
        for word in command:
            data = word if isinstance(word, bytes) else _text(word).encode()
            parts += (_ARRAY.pack(_TEXT_32, len(data)), data)
    return b"".join(parts)


def _text(word: str | float) -> str:
    return repr(word) if isinstance(word, float) else str(word)

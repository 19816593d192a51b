"""The records of groups and batches as Redis keeps them.

The record of a closed group is compressed, since a run keeps all of them: about 0.3 KB for eight samples, not 1.3 KB.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import zstandard

from rollout_service.groups.shares import Owner
from rollout_service.store.codec import runs as run_codec
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

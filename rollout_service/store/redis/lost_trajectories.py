"""Which trajectories of a Redis store are not in its shared folder, and how to begin again with another folder.

Looking changes nothing. After `begin_again`, no trajectory can be stored in a file of the folder before; services at
work notice that within seconds and use the new one. What was lost stays referenced, so files that turn up later can be
put into the new folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import anyio.to_thread
from pydantic_core import from_json

from rollout_service.base.errors import ConfigurationError, StoreError
from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.redis.replies import decode_row
from rollout_service.store.redis.rollouts import ROWS_AT_ONCE
from rollout_service.store.redis.trajectories import RedisSegmentLedger, referred
from rollout_service.store.segments.contract import SegmentFiles
from rollout_service.store.segments.ledger import SegmentReference
from rollout_service.store.segments.proof import FolderMark, FolderProof, prove_shared

_SCANNED_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class LostTrajectory:
    rollout_id: str
    file: str
    run_id: str | None
    environment: str


@dataclass(frozen=True, slots=True)
class FolderReport:
    """Compares a store's shared folder with its references."""

    problem: StoreError | None
    """Why the folder itself cannot be used."""
    referenced: int
    lost: Sequence[LostTrajectory]

    def by_run(self) -> Counter[str | None]:
        """Return how many trajectories each run has lost; None stands for rollouts of no run."""
        return Counter(one.run_id for one in self.lost)

    def by_environment(self) -> Counter[str]:
        """Return how many trajectories of each environment are lost; `session` has parts of live sessions."""
        return Counter(one.environment for one in self.lost)


async def look(connection: RedisConnection, files: SegmentFiles) -> FolderReport:
    ledger = RedisSegmentLedger(connection)
    proof = FolderProof(files, FolderMark(*await ledger.mark(None)))
    problem = await anyio.to_thread.run_sync(_problem, proof)
    referenced, missing = 0, list[tuple[str, SegmentReference]]()
    sizes = {} if problem is not None else await anyio.to_thread.run_sync(_sizes, files)
    async for rollout_id, reference in _references(connection):
        referenced += 1
        if sizes.get(reference.file, 0) < reference.offset + reference.framed_length:
            missing.append((rollout_id, reference))
    return FolderReport(problem, referenced, await _described(connection, dict(missing)))


async def begin_again(connection: RedisConnection, files: SegmentFiles) -> None:
    """Let a store use another folder, which is created and marked.

    Raises:
        ConfigurationError: The folder is still as it should be, cannot be written, or belongs to another store.
        StoreError: The Redis fails.
    """
    ledger = RedisSegmentLedger(connection)
    proof = FolderProof(files, FolderMark(*await ledger.mark(None)))
    if await anyio.to_thread.run_sync(_problem, proof) is None:
        raise ConfigurationError(
            f"{files.texts.subject} is the store's, and can be used",
            hint=f"Services that cannot use it see another one. {files.texts.shared}",
        )
    await connection.call("segments_begin_again")
    await prove_shared(files, ledger)


async def _references(connection: RedisConnection) -> AsyncIterator[tuple[str, SegmentReference]]:
    prefix = connection.key("t:")
    cursor = b"0"
    seen: set[bytes] = set()  # Redis may return a key more than once
    while True:
        answer = await connection.command("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", _SCANNED_AT_ONCE)
        cursor, keys = answer
        new = [key for key in keys if key not in seen]
        seen.update(new)
        values = await connection.command("MGET", *new) if new else []
        for key, value in zip(new, values, strict=True):
            if (text := referred(value)) is not None:
                yield key.decode().removeprefix(prefix), SegmentReference.parse(text)
        if int(cursor) == 0:
            break


async def _described(connection: RedisConnection, lost: Mapping[str, SegmentReference]) -> list[LostTrajectory]:
    names, found = list(lost), []
    for start in range(0, len(names), ROWS_AT_ONCE):
        answer = await connection.read("rollouts_rows", 0, *names[start : start + ROWS_AT_ONCE])
        for row in (decode_row(reply) for reply in answer if reply is not None):
            environment = str(from_json(row["request"])["task"]["environment"])
            name = row["rollout_id"]
            found.append(LostTrajectory(name, lost[name].file, row["run_id"], environment))
    return found


def _sizes(files: SegmentFiles) -> dict[str, int]:
    try:
        return files.sizes()
    except OSError as error:
        raise files.failed(error) from error


def _problem(proof: FolderProof) -> StoreError | None:
    try:
        proof.check_usable()
    except StoreError as error:
        return error
    return None

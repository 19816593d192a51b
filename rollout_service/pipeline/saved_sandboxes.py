"""The sandboxes of agents at work, saved now and then, so that an interrupted rollout runs no tool of before again.

- A sandbox is saved while its agent waits for the engine, and the agent's next call waits until that has ended. No
  failure to save it reaches the rollout.
- A rollout goes on from a sandbox's files only if exactly the whole turns that they are after were saved too.
- Each file, and all of one node together, are bounded. A file is removed when its rollout ends or begins anew; one
  whose rollout has ended elsewhere is removed at the next start of its node or, an hour later, of another.
- Where nodes share a folder, each writes into a folder of its own in it, and takes files out of those of others.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import anyio
import anyio.to_thread
import numpy as np
import structlog
import zstandard
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from api_schemas.rollouts import RolloutRequest
from api_schemas.trajectories import Message
from rollout_service.agents.tool_calling.agent import TOOL_STATE
from rollout_service.base.errors import ServiceError
from rollout_service.engines.serving.saved_turns import SavedTurn
from rollout_service.engines.serving.turn_log import TurnLog
from rollout_service.environments.contract import Environment
from rollout_service.episodes import Episode
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.store.contract import Store
from sandboxes import Sandbox, SandboxError, SandboxProvider, SandboxSpec, SandboxUnsavedError
from sandboxes.errors import FileTooLargeError, SandboxClosedError

log = structlog.get_logger(__name__)

SAVE_SECONDS = 10.0
"""An agent waits for so long; a sandbox that takes longer is not saved."""
SUFFIX, PART_SUFFIX = ".sandbox", ".part"
LEFT_SECONDS = 3600.0
"""Age of another node's file that may have been left behind."""
_LEVEL = 1
_LENGTH = struct.Struct("<I")
_MAX_HEADER = 64 << 20
_CHUNK = 1 << 18
_END = b"end of the saved sandbox"
"""The last bytes of a file: the rest may be lost with the host's power, and unpacking would not tell."""
_UNREADABLE = (OSError, ValueError, struct.error, zstandard.ZstdError)


class SavedWork(BaseModel):
    """The head of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout_id: str
    turns: int
    """Whole turns, with all their tool calls; at least one."""
    digest: str
    """A hash of the ids that were sampled in them."""
    results: list[Message]
    """Results of the last turn's tool calls, which the policy has not been told."""
    image: str = ""
    """Identity of the image's files."""
    is_prepared: bool
    """The sandbox had started from the files of a shared setup."""
    tool_state: dict[str, JsonValue]
    tool_error_turns: list[int] = []
    """Turns with a tool call that failed."""
    proposed_turns: list[int] = []
    """Turns at which branches may begin."""


@dataclass(frozen=True, slots=True)
class SavedSandbox:
    work: SavedWork
    results: list[list[Message]]
    """Results of each turn's tool calls."""
    path: Path


class SavedSandboxes:
    def __init__(
        self,
        folder: Path,
        metrics: Metrics,
        flush_turns: Callable[[], Awaitable[None]],
        *,
        seconds: float,
        limit: int,
        budget: int,
        shared: bool = False,
    ) -> None:
        """Sandboxes are saved once their agents have worked for `seconds` since the last time.

        Args:
            folder: where the files are; nothing else may be in it.
            flush_turns: waits until all turns so far are saved.
            limit: the most bytes that one sandbox's files may have.
            budget: the most bytes of all files, compressed.
            shared: whether the folders beside `folder` are those of other nodes.
        """
        self.seconds = seconds
        self._folder = folder
        self._metrics = metrics
        self._flush_turns = flush_turns
        self._limit, self._budget = limit, budget
        self._shared = shared
        self._sizes: dict[str, int] = {}
        self._has_failed = False

    async def sweep(self, store: Store) -> None:
        """Before any rollout begins, remove files of none under way."""
        for path in await anyio.to_thread.run_sync(self._list):
            if not await _may_go_on(path, store):
                await _remove(path)
            elif path.parent == self._folder:
                with suppress(FileNotFoundError):  # another node may take it meanwhile
                    self._sizes[path.name] = path.stat().st_size

    def _list(self) -> list[Path]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in [*self._folder.glob(f"*{PART_SUFFIX}"), *self._left(f"*{PART_SUFFIX}")]:
            path.unlink(missing_ok=True)
        return [*sorted(self._folder.glob(f"*{SUFFIX}")), *self._left(f"*{SUFFIX}")]

    def _left(self, pattern: str) -> list[Path]:
        """Return files of other nodes that may be gone for good."""
        return [path for path in self._others(pattern) if _age(path) > LEFT_SECONDS]

    def _others(self, pattern: str) -> list[Path]:
        found = self._folder.parent.glob(f"*/{pattern}") if self._shared else ()
        return [path for path in found if path.parent != self._folder]

    async def forget(self, rollout_id: str, *, is_elsewhere: bool = False) -> None:
        """Remove the file of a rollout that has ended or begins anew; shielded.

        One that `is_elsewhere` may go on from the file there, if nodes share a folder.
        """
        is_left = is_elsewhere and self._shared
        if self._sizes.pop(name := _name_of(rollout_id), None) is not None and not is_left:
            await _remove(self._folder / name)

    async def save(self, sandbox: Sandbox, provider: SandboxProvider, work: SavedWork) -> None:
        outcome = "slow"
        with anyio.move_on_after(SAVE_SECONDS):
            outcome = await self._try_to_save(sandbox, provider, work)
        self._metrics.count_sandbox_save(outcome)

    def count_refused(self) -> None:
        self._metrics.count_sandbox_save("refused")

    async def _try_to_save(self, sandbox: Sandbox, provider: SandboxProvider, work: SavedWork) -> str:
        """Return `saved`, or why not."""
        try:
            if not await provider.saves(sandbox.spec):
                return "refused"
            image = await provider.identity(SandboxSpec(image=sandbox.spec.image))
            return await self._save(sandbox, work.model_copy(update={"image": image}))
        except (SandboxUnsavedError, SandboxClosedError):
            return "refused"
        except FileTooLargeError:
            return "large"
        except (SandboxError, OSError) as error:
            if not self._has_failed:
                text = "a sandbox could not be saved; more failures are only counted"
                log.warning(text, sandbox=sandbox.id, why=str(error), folder=str(self._folder))
            self._has_failed = True
            return "failed"

    async def _save(self, sandbox: Sandbox, work: SavedWork) -> str:
        name = _name_of(work.rollout_id)
        part = self._folder / f"{name}{PART_SUFFIX}"
        try:
            async with _compressed(part) as write:
                head = work.model_dump_json().encode()
                await write(_LENGTH.pack(len(head)) + head)
                async with aclosing(sandbox.save(limit=self._limit)) as parts:
                    async for data in parts:
                        await write(data)
                await write(_END)
            size = (await anyio.to_thread.run_sync(part.stat)).st_size
            if sum(self._sizes.values()) - self._sizes.get(name, 0) + size > self._budget:
                return "full"
            self._sizes[name] = size  # at once, since others are being saved
            await self._flush_turns()  # without the turns, it would be of no use
            await anyio.to_thread.run_sync(part.replace, self._folder / name)
        finally:
            await _remove(part)
        return "saved"

    async def find(self, rollout_id: str, turns: Sequence[SavedTurn], image: str) -> SavedSandbox | None:
        """Return a saved sandbox that suits the saved turns; None if there is none.

        Of several, return that with the most turns. It belongs to this node from now on.
        """
        name = _name_of(rollout_id)
        paths = [self._folder / name] if name in self._sizes else []
        paths += await anyio.to_thread.run_sync(self._others, name)
        found = [await anyio.to_thread.run_sync(_read_suiting, path, rollout_id, turns, image) for path in paths]
        best = max((one for one in found if one is not None), key=lambda one: one.work.turns, default=None)
        if best is None or best.path.parent == self._folder:
            return best
        moved = self._folder / name
        try:
            self._sizes[name] = (await anyio.to_thread.run_sync(best.path.stat)).st_size
            await anyio.to_thread.run_sync(best.path.replace, moved)
        except OSError:  # yet another node has it
            return None
        return replace(best, path=moved)

    @asynccontextmanager
    async def opened(self, saved: SavedSandbox) -> AsyncIterator[Path]:
        """Yield a file to start a sandbox with, which is removed at the end of the block."""
        copy = saved.path.with_name(f"start-{saved.path.name}{PART_SUFFIX}")
        try:
            await anyio.to_thread.run_sync(_unpack, saved.path, copy)
            yield copy
        finally:
            await _remove(copy)


class SandboxSaver:
    def __init__(
        self,
        store: SavedSandboxes,
        provider: SandboxProvider,
        turns: TurnLog,
        episode: Episode,
        *,
        is_prepared: bool,
    ) -> None:
        """`is_prepared` is true for a sandbox that started from the files of a shared setup."""
        self._store, self._provider, self._turns, self._episode = store, provider, turns, episode
        self._is_prepared = is_prepared
        self._next = store.seconds

    def due(self, results: list[Message]) -> Callable[[], Coroutine[Any, Any, None]] | None:
        """Return None unless it is time to save; the agent tells the policy `results` next."""
        if (now := self._turns.clock.seconds) < self._next:  # as during a replay, when it stands still
            return None
        if not self._turns.sampled or self._episode.sandbox is None:
            return None
        self._next = now + self._store.seconds
        return partial(self._save, self._episode.sandbox, list(results))

    async def _save(self, sandbox: Sandbox, results: list[Message]) -> None:
        sampled = self._turns.sampled
        try:
            work = SavedWork(
                rollout_id=self._episode.request.rollout_id or "",
                turns=len(sampled),
                digest=digest_of(sampled),
                results=results,
                is_prepared=self._is_prepared,
                tool_state=self._episode.state.get(TOOL_STATE, {}),
                tool_error_turns=sorted(self._episode.tool_error_turns),
                proposed_turns=sorted(self._episode.proposed_turns),
            )
        except ValidationError:  # a tool keeps something that is not JSON
            self._store.count_refused()
            return
        await self._store.save(sandbox, self._provider, work)


def may_save(environment: Environment, request: RolloutRequest) -> bool:
    """Return whether rollouts can go on from saved sandboxes.

    Secrets of a sandbox would be on the host's disk.
    """
    spec = environment.spec
    has_secrets = bool(spec.sandbox.secrets or spec.init_secrets)
    is_replayed = environment.replayable != "never" and spec.parallel is None and request.branch_of is None
    return environment.init_leaves_files and is_replayed and spec.image is not None and not has_secrets


def digest_of(sampled: Sequence[Sequence[int]]) -> str:
    found = hashlib.sha256()
    for ids in sampled:
        found.update(_LENGTH.pack(len(ids)) + np.array(ids, "<i4").tobytes())
    return found.hexdigest()


def _name_of(rollout_id: str) -> str:
    return hashlib.sha256(rollout_id.encode()).hexdigest()[:32] + SUFFIX


async def _remove(path: Path) -> None:
    """Remove a file if it is there; shielded."""
    with anyio.CancelScope(shield=True), suppress(OSError):  # at the latest, a later sweep removes it
        await anyio.to_thread.run_sync(path.unlink)


async def _may_go_on(path: Path, store: Store) -> bool:
    """Return whether the rollout of a file is under way; true too if the store cannot say, as while a shard is away."""
    try:
        work = await anyio.to_thread.run_sync(_read_head, path)
        rollout = await store.get(work.rollout_id)
    except _UNREADABLE:
        return False
    except ServiceError:
        return True
    return rollout is not None and not rollout.state.terminal


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:  # it is not there any more
        return 0.0


def _read_suiting(path: Path, rollout_id: str, turns: Sequence[SavedTurn], image: str) -> SavedSandbox | None:
    """Return None unless a rollout with these saved turns can go on from the file."""
    try:
        work = _read_head(path)
    except _UNREADABLE:
        return None
    count = work.turns
    if work.rollout_id != rollout_id or work.image != image or not 0 < count <= len(turns):
        return None
    if work.digest != digest_of([turn.generation.output_ids for turn in turns[:count]]):
        return None
    results = [_results_of(turn) for turn in turns[1:count]]
    return SavedSandbox(work, [*results, work.results], path) if all(results) else None


def _results_of(turn: SavedTurn) -> list[Message]:
    """Return nothing if the agent gave anything but results."""
    given = turn.given or []
    return given[0].messages if len(given) == 1 and given[0].reason is None else []


@asynccontextmanager
async def _compressed(path: Path) -> AsyncIterator[Callable[[bytes], Awaitable[object]]]:
    """Yield a function that appends in a thread."""
    file = await anyio.to_thread.run_sync(lambda: path.open("wb"))
    try:
        writer = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).stream_writer(file, closefd=False)
        yield lambda data: anyio.to_thread.run_sync(writer.write, data)
        await anyio.to_thread.run_sync(writer.close)
    finally:
        file.close()


def _read_head(path: Path) -> SavedWork:
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
        return _head_of(reader)


def _head_of(reader: zstandard.ZstdDecompressionReader) -> SavedWork:
    (length,) = _LENGTH.unpack(reader.read(_LENGTH.size))
    if length > _MAX_HEADER:
        raise ValueError("its head is too long")
    head = b""
    while len(head) < length and (more := reader.read(length - len(head))):
        head += more
    return SavedWork.model_validate_json(head)


def _unpack(source: Path, target: Path) -> None:
    try:
        with (
            source.open("rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file) as reader,
            target.open("wb") as copy,
        ):
            _head_of(reader)
            _copy_to_end(reader, copy)
    except (zstandard.ZstdError, ValueError, struct.error) as error:
        raise OSError(f"{source} is damaged: {error}") from error


def _copy_to_end(reader: zstandard.ZstdDecompressionReader, target: BinaryIO) -> None:
    held = b""
    while data := reader.read(_CHUNK):
        held += data
        target.write(held[: -len(_END)])
        held = held[-len(_END) :]
    if held != _END:
        raise ValueError("it ends early")

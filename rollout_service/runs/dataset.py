"""The tasks of a run: by their number over all epochs, also from its environment's own data set.

Task n of a source is the same at any time and after any restart. A file or data set that has changed since the run was
created is refused, since its numbers would mean other tasks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

import anyio.to_thread
from pydantic import JsonValue

from api_schemas.errors import FieldError
from api_schemas.runs import DatasetTasks, FileTasks, InlineTasks, TaskSource
from api_schemas.tasks import Task
from rollout_service.base.errors import InvalidFieldError, ServiceError
from rollout_service.environments.contract import Environment
from rollout_service.environments.dataset_files import select_split
from rollout_service.runs.task_files import FIELD, Rows, open_file
from rollout_service.store.runs_contract import RunRecord

ReadInline = Callable[[int, int], Awaitable[Sequence[Task]]]
"""Reads tasks, given the index of the first and how many."""


class SourceChangedError(ServiceError):
    """The file or data set that a run's tasks come from has changed."""

    code = "source_changed"


Reopen = Callable[[FileTasks | DatasetTasks, str | None], Rows]
"""Opens a file or data set again and compares its digest; raises SourceChangedError. It blocks."""


@dataclass(frozen=True, slots=True)
class TaskPosition:
    number: int
    epoch: int
    row: int


class TaskOrder:
    """Maps task numbers to epochs and rows."""

    def __init__(self, source: TaskSource, size: int) -> None:
        """`size` is the number of tasks in an epoch."""
        self._source = source
        self._size = size
        self._epoch = -1
        self._shuffled: Sequence[int] = ()

    def positions(self, first: int, count: int) -> list[TaskPosition]:
        """Return the positions of these task numbers, fewer at the end of the last epoch. Sorts once an epoch."""
        end = self._end(first + count)
        return [self._position(number) for number in range(first, min(first + count, end))]

    def _end(self, requested: int) -> int:
        if isinstance(self._source, InlineTasks) and self._source.open:
            return self._size
        return requested if self._source.epochs is None else self._size * self._source.epochs

    def _position(self, number: int) -> TaskPosition:
        epoch, index = divmod(number, self._size)
        if not self._source.shuffle:
            return TaskPosition(number, epoch, index)
        if epoch != self._epoch:
            self._shuffled = shuffled(self._size, self._source.seed, epoch)
            self._epoch = epoch
        return TaskPosition(number, epoch, self._shuffled[index])


def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    """Return a permutation of 0..size-1 that is the same on every machine and in every release.

    It sorts by a keyed hash of each index, so it does not depend on a library's random numbers.
    """
    key = f"{seed}:{epoch}:".encode()
    return sorted(range(size), key=lambda position: hashlib.blake2b(key + b"%d" % position).digest())


class RunTasks:
    def __init__(self, source: TaskSource, size: int, rows: Rows | None, inline: ReadInline) -> None:
        """`rows` are those of a file or data set, if any; `inline` reads inline and appended tasks from the store."""
        self._source = source
        self._order = TaskOrder(source, size)
        self._rows = rows
        self._inline = inline

    @classmethod
    async def open(cls, run: RunRecord, inline: ReadInline, reopen: Reopen) -> Self:
        """
        Raises:
            SourceChangedError: The file or data set has changed.
        """
        source = run.request.source
        rows = None
        if not isinstance(source, InlineTasks):
            rows = await anyio.to_thread.run_sync(reopen, source, run.digest)
        return cls(source, run.tasks, rows, inline)

    async def take(self, first: int, count: int) -> list[tuple[TaskPosition, Task]]:
        """Return tasks with their positions, fewer at the end of the last epoch."""
        positions = await anyio.to_thread.run_sync(self._order.positions, first, count)
        if not isinstance(self._source, InlineTasks) and self._rows is not None:
            return await anyio.to_thread.run_sync(_read, self._source, self._rows, positions)
        return [(one, task) for one in positions for task in await self._inline(one.row, 1)]


def _read(
    source: FileTasks | DatasetTasks, rows: Rows, positions: Sequence[TaskPosition]
) -> list[tuple[TaskPosition, Task]]:
    name = source.environment
    return [(one, Task(environment=name, instance=rows.read(one.row))) for one in positions]


EnvironmentOf = Callable[[str], Environment]
"""Returns the environment of a name; raises InvalidFieldError or ConfigurationError."""


class DatasetRows(Rows):
    """The instances of one split, in memory."""

    def __init__(self, instances: list[dict[str, JsonValue]]) -> None:
        self._instances = instances
        canonical = json.dumps(instances, sort_keys=True, separators=(",", ":"))
        self.digest = hashlib.sha256(canonical.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._instances)

    def read(self, row: int) -> dict[str, JsonValue]:
        return dict(self._instances[row])


def open_dataset(source: DatasetTasks, environment: Environment) -> DatasetRows:
    """Return the instances of the source's split, each validated; call it in a thread.

    Raises:
        InvalidFieldError: The split does not exist or is empty, or the environment rejects an instance.
    """
    rows = _rows(source, environment)
    for position in range(len(rows)):
        try:
            environment.check(rows.read(position))
        except InvalidFieldError as error:
            where = f"instance {position + 1} of the data set of {source.environment!r}"
            problem = FieldError(path=f"{FIELD}.environment", message=f"{where}: {error}")
            raise InvalidFieldError([problem], hint=error.hint) from error
    return rows


def reopening(environment_of: EnvironmentOf) -> Reopen:
    """Return the function that opens a run's source again.

    A file may be read wherever it is now, since its digest shows that the run's creator has had the same content.
    """

    def reopen(source: FileTasks | DatasetTasks, digest: str | None) -> Rows:
        try:
            if isinstance(source, FileTasks):
                what, rows = source.path, open_file(source, lambda _: None)
            else:
                what = f"the data set of {source.environment!r}"
                rows = _rows(source, environment_of(source.environment))
        except InvalidFieldError as error:
            raise SourceChangedError(
                f"the tasks cannot be read again: {error}", hint="Restore them and resume the run, or end the run."
            ) from error
        if rows.digest != digest:
            raise SourceChangedError(
                f"{what} has changed since the run was created, so the run's cursor no longer points to the same task",
                hint="Restore it and resume the run, or end the run and create one for the new tasks.",
            )
        return rows

    return reopen


def _rows(source: DatasetTasks, environment: Environment) -> DatasetRows:
    instances = select_split(environment.dataset(), source.split, field=f"{FIELD}.split")
    if not instances:
        message = f"{source.environment!r} ships without instances"
        raise InvalidFieldError.at(
            f"{FIELD}.environment",
            message,
            hint="`rollout-service env check` names the file that has none; or send tasks of your own.",
        )
    return DatasetRows(instances)

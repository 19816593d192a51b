"""Tasks of a run from its environment's own data set.

Guarantees: a data set that has changed since the run was created is refused, since its numbers would mean other tasks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from pydantic import JsonValue

from api_schemas.errors import FieldError
from api_schemas.runs import DatasetTasks, FileTasks
from rollout_service.base.errors import InvalidFieldError
from rollout_service.environments.contract import Environment
from rollout_service.environments.dataset_files import select_split
from rollout_service.runs.tasks.files import FIELD, Rows, SourceChangedError, reopen_file
from rollout_service.runs.tasks.source import Reopen

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


def reopen_dataset(source: DatasetTasks, environment: Environment, digest: str | None) -> DatasetRows:
    """Return the same instances as before; call it in a thread.

    Raises:
        SourceChangedError: The data set has changed.
    """
    try:
        rows = _rows(source, environment)
    except InvalidFieldError as error:
        raise _changed(source) from error
    if rows.digest != digest:
        raise _changed(source)
    return rows


def reopening(environment_of: EnvironmentOf) -> Reopen:
    """Return a function that reopens a source of any kind but inline."""

    def reopen(source: FileTasks | DatasetTasks, digest: str | None) -> Rows:
        if isinstance(source, FileTasks):
            return reopen_file(source, digest)
        return reopen_dataset(source, environment_of(source.environment), digest)

    return reopen


def _rows(source: DatasetTasks, environment: Environment) -> DatasetRows:
    instances = select_split(environment.dataset(), source.split, field=f"{FIELD}.split")
    if not instances:
        message = f"{source.environment!r} ships without instances"
        raise InvalidFieldError(
            [FieldError(path=f"{FIELD}.environment", message=message)],
            hint="`rollout-service env check` names the file that has none; or send tasks of your own.",
        )
    return DatasetRows(instances)


def _changed(source: DatasetTasks) -> SourceChangedError:
    return SourceChangedError(
        f"the data set of {source.environment!r} has changed since the run was created, "
        "so the run's cursor no longer points to the same task",
        hint="Restore the environment and resume the run, or end the run and create one for the new data set.",
    )

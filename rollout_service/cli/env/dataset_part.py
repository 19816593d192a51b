"""The instances that a command is about. Rows are read one at a time; a bad one is reported and hides no other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from pydantic import JsonValue, ValidationError

from api_schemas.runs import DatasetTasks, FileTasks, Run
from api_schemas.tasks import Task
from rollout_service.base.errors import ConfigurationError
from rollout_service.base.validation import describe_problems
from rollout_service.cli import common
from rollout_service.cli.env.check import load_environment, read_dataset
from rollout_service.environments.contract import Environment
from rollout_service.environments.dataset_files import select_split
from rollout_service.runs.task_files import open_file

FILES = (".jsonl", ".parquet")
ROWS = "rows"
"""The environment of a file whose rows name their own."""
Found = Iterable[tuple[str, dict[str, JsonValue] | Exception]]
"""Names of environments, each with an instance, or with the reason why a row has none."""


@dataclass(frozen=True, slots=True)
class DatasetPart:
    instances: Found
    environments: dict[str, Environment] = field(default_factory=dict)

    def environment(self, name: str) -> Environment:
        if name not in self.environments:
            self.environments[name] = load_environment(name)
        return self.environments[name]


def part_of_environment(name_or_path: str, split: str | None) -> DatasetPart:
    environment = load_environment(name_or_path)
    dataset = read_dataset(environment)
    if split is not None:
        dataset = select_split(dataset, split, field="split")
    return DatasetPart(((name_or_path, one) for one in dataset or [{}]), {name_or_path: environment})


def part_of_file(path: Path, environment: str | None) -> DatasetPart:
    """Return the instances of a file; without an environment, each row is a task that names its own."""
    rows = open_file(FileTasks(path=str(path), environment=ROWS), lambda _row: None)
    read = (rows.read(number) for number in range(len(rows)))
    if environment is not None:
        return DatasetPart((environment, row) for row in read)
    return DatasetPart(_task(number, row) for number, row in enumerate(read, start=1))


def part_of_run(url: str, key: str | None, run_id: str) -> DatasetPart:
    """Return the instances of a run's tasks, which this machine must have too."""

    async def ask() -> Run:
        async with common.connect(url, key) as client:
            return await client.open_run(run_id).view()

    source = anyio.run(ask).request.source
    if isinstance(source, DatasetTasks):
        return part_of_environment(source.environment, source.split)
    if isinstance(source, FileTasks):
        return part_of_file(Path(source.path), source.environment)
    raise common.CommandError(
        f"the tasks of run {run_id} were part of its request, and the service does not list them",
        hint="Name a JSONL file with these tasks.",
    )


def _task(number: int, row: dict[str, JsonValue]) -> tuple[str, dict[str, JsonValue] | Exception]:
    try:
        task = Task.model_validate(row.get("task", row))
    except ValidationError as error:
        problems = "; ".join(describe_problems(error, Task))
        hint = "Pass --environment if rows are instances."
        return f"row {number}", ConfigurationError(f"it is not a task: {problems}", hint=hint)
    return task.environment, task.instance

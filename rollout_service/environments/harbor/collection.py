"""Folders of tasks in Harbor's format as one environment, whose instances name a task.

Guarantees: an instance can name only tasks that were loaded, so no other path of this machine; a task that cannot be
used does not hide the others, and naming it says why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from rollout_service.base.errors import (
    ConfigurationError,
    EnvironmentFailedError,
    InvalidFieldError,
    did_you_mean,
)
from rollout_service.environments.contract import Environment, EnvironmentSpec
from rollout_service.environments.harbor import FILE_NAME
from rollout_service.episodes import Episode, Score
from rollout_service.settings.pipeline import HarborSettings

if TYPE_CHECKING:
    from rollout_service.environments.harbor.environment import HarborTaskEnvironment

ALL = "harbor"
KEY = "task"
DEPTH = 3
"""Tasks are looked for so far below a folder."""


class HarborEnvironment(Environment):
    """A task's name is its folder's path below the collection's folder."""

    has_solution = True

    def __init__(
        self,
        name: str,
        tasks: Mapping[str, HarborTaskEnvironment],
        problems: Mapping[str, ConfigurationError] | None = None,
    ) -> None:
        self.spec = EnvironmentSpec(name=name, description=f"{len(tasks)} tasks in Harbor's format", prompt="")
        self.tasks = dict(tasks)
        self.problems = dict(problems or {})

    def check(self, instance: dict[str, JsonValue]) -> None:
        self.for_instance(instance)

    def for_instance(self, instance: dict[str, JsonValue]) -> Environment:
        named = instance.get(KEY)
        if not isinstance(named, str):
            raise _invalid(f"instance.{KEY}", "must be the name of a task")
        if (task := self.tasks.get(named)) is not None:
            return task
        if (problem := self.problems.get(named)) is not None:
            raise _invalid(f"instance.{KEY}", f"the task cannot be used: {problem}", problem.hint)
        message = f"there is no task {named!r}{did_you_mean(named, self.tasks)}"
        raise _invalid(f"instance.{KEY}", message, "Tasks are loaded when the service starts.")

    def findings(self) -> list[str]:
        found = [str(problem) for problem in self.problems.values()]
        found += [f"{name}: {finding}" for name, task in self.tasks.items() for finding in task.findings()]
        return found or ([] if self.tasks else ["there is no task in the folder"])

    def warnings(self) -> list[str]:
        return [f"{name}: {warning}" for name, task in self.tasks.items() for warning in task.warnings()]

    def dockerfiles(self) -> dict[str, Path]:
        return {image: path for task in self.tasks.values() for image, path in task.dockerfiles().items()}

    def dataset(self) -> list[dict[str, JsonValue]]:
        return [{KEY: name} for name in self.tasks]

    async def run(self, episode: Episode) -> StopReason:  # noqa: ARG002 - a task's environment has it
        raise _not_specific()

    async def evaluate(self, episode: Episode) -> Score:  # noqa: ARG002 - a task's environment has it
        raise _not_specific()


def is_harbor_folder(folder: Path) -> bool:
    return (folder / FILE_NAME).is_file() or next(iter(_find(folder)), None) is not None


def load_harbor(folder: Path, settings: HarborSettings) -> HarborEnvironment:
    """Load a task, or all tasks below a folder; this blocks.

    Raises:
        ConfigurationError: The folder is one task, which cannot be used.
    """
    folder = folder.resolve()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name)[:64].strip("._-") or ALL
    if (folder / FILE_NAME).is_file():
        return HarborEnvironment(name, {folder.name: _load_task(folder, folder.name, name, settings)})
    tasks: dict[str, HarborTaskEnvironment] = {}
    problems: dict[str, ConfigurationError] = {}
    for found in _find(folder):
        below = str(found.relative_to(folder))
        try:
            tasks[below] = _load_task(found, below, name, settings)
        except ConfigurationError as error:
            problems[below] = error
    return HarborEnvironment(name, tasks, problems)


def _load_task(folder: Path, task: str, collection: str, settings: HarborSettings) -> HarborTaskEnvironment:
    # Imported with the first task, since most services have none in this format.
    from rollout_service.environments.harbor.environment import HarborTaskEnvironment
    from rollout_service.environments.harbor.task_folder import load_task

    return HarborTaskEnvironment(load_task(folder, task, settings.variables), collection, settings)


def join(collections: Sequence[HarborEnvironment]) -> HarborEnvironment:
    """Return the tasks of all collections; a name that several have is given with its collection's."""
    counts = Counter(name for one in collections for name in (*one.tasks, *one.problems))

    def full(one: HarborEnvironment, name: str) -> str:
        return f"{one.spec.name}/{name}" if counts[name] > 1 else name

    return HarborEnvironment(
        ALL,
        {full(one, name): task for one in collections for name, task in one.tasks.items()},
        {full(one, name): problem for one in collections for name, problem in one.problems.items()},
    )


def _find(folder: Path, depth: int = DEPTH) -> Iterable[Path]:
    """Follow no links."""
    if (folder / FILE_NAME).is_file():
        yield folder
    elif depth and folder.is_dir():
        for below in sorted(folder.iterdir()):
            if below.is_dir() and not below.is_symlink() and not below.name.startswith("."):
                yield from _find(below, depth - 1)


def _invalid(path: str, message: str, hint: str = "") -> InvalidFieldError:
    return InvalidFieldError.at(path, message, hint=hint)


def _not_specific() -> EnvironmentFailedError:
    return EnvironmentFailedError("the environment of the task was not chosen by its instance")

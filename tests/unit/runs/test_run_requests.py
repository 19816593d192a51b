"""Requests about runs, as callers send them."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import JsonValue

from api_schemas.runs import AppendTasks, FileTasks, InlineTasks, RunRequest
from api_schemas.tasks import Task
from rollout_service.base.errors import ConflictError, InvalidFieldError
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.episodes import Episode, Score
from rollout_service.http.keyring import Role
from rollout_service.runs.api import RunService
from tests.support.run_bench import Bench, bench, run_service


class Positive(AgentEnvironment):
    """An environment that takes positive numbers, and notes where it was asked."""

    def __init__(self) -> None:
        super().__init__(EnvironmentSpec(name="numbers", prompt="{{ instance.n }}"))
        self.asked_in: set[threading.Thread] = set()

    def check(self, instance: dict[str, JsonValue]) -> None:
        self.asked_in.add(threading.current_thread())
        if instance["n"] <= 0:
            raise InvalidFieldError.at("instance.n", "it is not positive")

    async def evaluate(self, episode: Episode) -> Score:
        raise NotImplementedError


def service(it: Bench, environment: Positive, **options: Any) -> RunService:
    async def find(name: str) -> Positive:
        if name != environment.spec.name:
            raise InvalidFieldError.at("environment", "there is none")
        return environment

    return run_service(it.store, it.manager, find, **options)


def task(n: int, environment: str = "numbers") -> Task:
    return Task(environment=environment, instance={"n": n})


@pytest.mark.parametrize(
    ("tasks", "path"),
    [([task(1), task(2), task(0)], "2.instance.n"), ([task(1), task(2, "letters")], "1.environment")],
)
async def test_a_task_at_fault_is_named_by_its_place(tasks, path):
    async with bench() as it:
        runs = service(it, Positive())
        with pytest.raises(InvalidFieldError, match=rf"^body\.source\.tasks\.{path}: "):
            await runs.create(RunRequest(run_id="a", source=InlineTasks(tasks=tasks), batch_size=1), Role.ADMIN)
        await it.create(source=InlineTasks(open=True))
        with pytest.raises(InvalidFieldError, match=rf"^body\.tasks\.{path}: "):
            await runs.append("a", AppendTasks(tasks=tasks))


async def test_the_tasks_of_a_request_are_checked_in_a_thread():
    async with bench() as it:
        environment = Positive()
        runs = service(it, environment)
        source = InlineTasks(tasks=[task(1)], open=True)
        await runs.create(RunRequest(run_id="a", source=source, batch_size=1), Role.ADMIN)
        await runs.append("a", AppendTasks(tasks=[task(2)]))
    assert environment.asked_in
    assert threading.main_thread() not in environment.asked_in


async def test_a_run_is_there_for_whoever_creates_it_again_whatever_became_of_its_file(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"n": 1}\n')
    async with bench() as it:
        runs = service(it, Positive())
        request = RunRequest(run_id="a", source=FileTasks(path=str(file), environment="numbers"), batch_size=1)
        created, is_new = await runs.create(request, Role.ADMIN)
        file.unlink()
        again, is_new_again = await runs.create(request, Role.ADMIN)
        assert (created.run_id, is_new, again.tasks, is_new_again) == ("a", True, 1, False)
        with pytest.raises(ConflictError):
            await runs.create(request.model_copy(update={"group_size": 2}), Role.ADMIN)


@pytest.mark.parametrize("role", [Role.SUBMIT, Role.ADMIN])
@pytest.mark.parametrize("folder", ["data", "elsewhere"])
async def test_each_role_creates_runs_of_the_files_that_it_may_name(tmp_path, role, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "tasks.jsonl").write_text('{"n": 1}\n')
    source = FileTasks(path=str(tmp_path / folder / "tasks.jsonl"), environment="numbers")
    may = role is Role.ADMIN or folder == "data"
    async with bench() as it:
        runs = service(it, Positive(), data_dirs=[tmp_path / "data"])
        with nullcontext() if may else pytest.raises(InvalidFieldError, match="none of the folders"):
            await runs.create(RunRequest(run_id="a", source=source, batch_size=1), role)

"""Readers who ask at once share one answer; an answer shows each reader what it may see."""

import json
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace

import anyio
import pytest
from fastapi import APIRouter, FastAPI, Response
from httpx import ASGITransport, AsyncClient
from starlette.requests import Request

from api_schemas.environments import EnvironmentView
from api_schemas.nodes import SandboxView
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from rollout_service.agents.harnesses.preset import HarnessSettings
from rollout_service.agents.parallel.settings import ParallelSettings
from rollout_service.agents.web.search import SearchSettings
from rollout_service.environments.builtin import calc
from rollout_service.environments.builtin.code import environment as code
from rollout_service.environments.builtin.math import environment as math
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn, SandboxSettings
from rollout_service.server.api.routes.rollouts import submit_rollout
from rollout_service.server.api.routes.support import shared_answers
from rollout_service.server.api.routes.support.shared_answers import (
    MAX_AGE_SECONDS,
    MAX_ANSWERS,
    SharedAnswers,
    SharedRoute,
    accepted_age,
)
from sandboxes import SandboxInfo
from tests.support.samples import segment, trajectory


@dataclass
class Counted:
    """Makes answers, and counts them."""

    gate: anyio.Event | None = None
    """What the making waits for."""
    made: int = 0
    error: Exception | None = None

    async def __call__(self) -> Response:
        self.made += 1
        number = self.made
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Response(str(number), media_type="text/plain")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("", 0),
        ("no-cache", 0),
        ("max-age=0", 0),
        ("max-age=2", 2),
        ("no-transform, Max-Age=3", 3),
        ("max-age=-1", 0),
        ("max-age=1e9", 1),
        ("max-age=86400", MAX_AGE_SECONDS),
        ("max-age=" + "9" * 5_000, MAX_AGE_SECONDS),
    ],
)
def test_a_request_says_how_old_an_answer_may_be(header, seconds):
    assert accepted_age(header) == seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(shared_answers.anyio, "current_time", lambda: now[0])
    return now


async def test_an_answer_is_as_old_as_the_reader_allows_at_most(clock):
    answers, make = SharedAnswers(), Counted()
    bodies = []
    for seconds, max_age in [(0.0, 2), (1.9, 2), (0.0, 1), (0.5, 1), (2.1, 2)]:
        clock[0] += seconds
        bodies.append((await answers.get("a", max_age, make)).body)
    assert bodies == [b"1", b"1", b"2", b"2", b"3"]


async def test_the_age_is_counted_from_when_the_making_began(clock):
    answers, make = SharedAnswers(), Counted()

    async def slow() -> Response:
        clock[0] += 5
        return await make()

    assert (await answers.get("a", 2, slow)).body == b"1"
    assert (await answers.get("a", 2, make)).body == b"2"
    aged = await answers.get("a", 2, make)
    assert "age" not in aged.headers
    clock[0] += 1.5
    assert (await answers.get("a", 2, make)).headers["age"] == "1"


@dataclass
class Readers:
    """Ask for the same, and wait until its making is let go."""

    answers: SharedAnswers = field(default_factory=SharedAnswers)
    make: Counted = field(default_factory=lambda: Counted(anyio.Event()))
    bodies: list[bytes] = field(default_factory=list)

    async def read(self) -> None:
        self.bodies.append(bytes((await self.answers.get("a", 2, self.make)).body))


async def test_readers_who_come_at_once_wait_for_one_answer():
    readers = Readers()
    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(readers.read)
        await anyio.wait_all_tasks_blocked()
        readers.make.gate.set()
    assert readers.bodies == [b"1"] * 10


async def test_a_reader_who_leaves_leaves_the_making_to_the_next():
    readers = Readers()
    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as first:
            first.start_soon(readers.read)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(readers.read)
            await anyio.wait_all_tasks_blocked()
            first.cancel_scope.cancel()
        readers.make.gate.set()
    assert readers.bodies == [b"2"]


async def test_an_error_is_its_readers_alone():
    answers, make = SharedAnswers(), Counted()
    make.error = RuntimeError("the store is locked")
    with pytest.raises(RuntimeError):
        await answers.get("a", 2, make)
    make.error = None
    assert (await answers.get("a", 2, make)).body == b"2"


async def test_few_answers_are_kept():
    answers, make = SharedAnswers(), Counted()
    for number in range(MAX_ANSWERS + 1):
        await answers.get(str(number), 2, make)
    assert (await answers.get(str(MAX_ANSWERS), 2, make)).body == b"%d" % (MAX_ANSWERS + 1)
    assert (await answers.get("0", 2, make)).body == b"%d" % (MAX_ANSWERS + 2)


async def test_only_readers_who_allow_it_get_the_answer_of_others():
    router = APIRouter(route_class=SharedRoute)
    count = 0

    @router.get("/lists/{name}")
    async def read(name: str, limit: int = 1) -> dict[str, object]:
        nonlocal count
        count += 1
        return {"name": name, "limit": limit, "count": count}

    app = FastAPI()
    app.include_router(router)
    shared = {"Cache-Control": "max-age=5"}
    async with AsyncClient(transport=ASGITransport(app), base_url="http://test") as http:

        async def ask(path: str, headers: dict[str, str]) -> object:
            return (await http.get(path, headers=headers)).raise_for_status().json()["count"]

        assert [await ask("/lists/a", shared) for _ in range(3)] == [1, 1, 1]
        assert await ask("/lists/a", {}) == 2
        assert await ask("/lists/a", {"Cache-Control": "no-cache"}) == 3
        assert await ask("/lists/a", shared) == 1
        assert await ask("/lists/b", shared) == 4
        assert await ask("/lists/a?limit=2", shared) == 5
        answer = await http.get("/lists/a", headers=shared)
        assert answer.headers["content-type"] == "application/json"


EVERYTHING = EnvironmentSpec(
    name="everything",
    description="All fields are set.",
    image="base",
    system="Be brief.",
    tools=["bash", "python"],
    sandbox=SandboxSettings(network=("example.org:443",), cpus=0.5, disk="1G", lifetime=60.0, env={"LANG": "C.UTF-8"}),
    evaluate_in=EvaluateIn.FRESH,
    artifacts=["/workspace"],
    artifacts_size="1M",
    runs_submission=True,
    harness=HarnessSettings(name="codex", env={"SECRET": "nobody else's business"}),
    search=SearchSettings(url="https://search.example:8443/api?key=secret"),
    binds={"/inside": "/outside"},
    parallel=ParallelSettings(max_width=4, max_critical_steps=6),
)
KEEPING = EnvironmentSpec(name="keeping", image="base", evaluate_in=EvaluateIn.SAME, agent_processes="keep")
SPECS = [calc.SPEC, code.SPEC, math.SPEC, EVERYTHING, KEEPING]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_an_environment_is_shown_as_it_is_written(spec):
    written = json.loads(spec.model_dump_json())
    assert "binds" not in written, "paths of the host are nobody else's business"
    assert "SECRET" not in spec.model_dump_json().upper()
    assert json.loads(EnvironmentView.model_validate(written).model_dump_json()) == written


def test_the_view_of_an_environment_has_every_field_that_is_shown():
    hidden = {name for name, field in EnvironmentSpec.model_fields.items() if field.exclude}
    assert EnvironmentView.model_fields.keys() == EnvironmentSpec.model_fields.keys() - hidden


@pytest.mark.parametrize("pid", [None, 17])
def test_a_sandbox_is_shown_as_it_is(pid):
    info = SandboxInfo("a", "r-1/1", "base", "apptainer", time.time(), pid)
    assert SandboxView.model_validate(asdict(info)).model_dump() == asdict(info)


TASK = Task(environment="calc")
ENDED = Rollout(
    rollout_id="r1",
    state=RolloutState.COMPLETED,
    task=TASK,
    pool="policy",
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
)
WHOLE = ENDED.model_copy(update={"trajectory": trajectory(segment([1, 2, 3]))})


async def submit(request: RolloutRequest) -> Rollout:
    return ENDED


async def wait(rollout_id: str, seconds: float) -> None:
    """Be too slow."""


async def get(rollout_id: str, *, trajectory: bool = False) -> Rollout:
    return WHOLE if trajectory else ENDED


async def test_an_ended_rollout_is_never_returned_without_its_trajectory():
    http = Request({"type": "http", "headers": []}, receive=anyio.sleep_forever)
    service = SimpleNamespace(submit=submit, wait=wait, get=get)
    answer = await submit_rollout(service, http, RolloutRequest(rollout_id="r1", task=TASK), wait=1)
    assert answer.status_code == 200
    assert Rollout.model_validate_json(answer.body) == WHOLE

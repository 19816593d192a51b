"""A submission that is repeated after its rollout has ended gets the whole result, however slow the store is."""

from datetime import UTC, datetime
from types import SimpleNamespace

import anyio
from starlette.requests import Request

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from rollout_service.server.api.routes.rollouts import submit_rollout
from tests.support.samples import segment, trajectory

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

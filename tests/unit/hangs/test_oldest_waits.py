"""The oldest wait of a stage is the innermost one that has made no progress for longest."""

from api_schemas.rollouts import Stage
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import Activity, OpenStep
from rollout_service.server.hangs.waits import StepWait, oldest_of_stages


def waiting(rollout_id: str, stage: Stage | None, started: float, moved: float | None = None) -> StepWait:
    step = OpenStep(StepKind.ENGINE, "e", "", stage, {})
    step.started, step.moved = started, moved
    activity = Activity(rollout_id, environment="code", attempt=1)
    return StepWait(activity, step, 100.0)


async def test_the_one_without_progress_for_longest():
    waits = [
        waiting("moves", Stage.ROLLOUT, 0.0, moved=99.0),
        waiting("old", Stage.ROLLOUT, 40.0),
        waiting("young", Stage.ROLLOUT, 90.0),
        waiting("starts", Stage.INIT, 95.0),
        waiting("between", None, 1.0),
    ]
    found = oldest_of_stages(waits)
    assert [(one.stage, one.rollout_id, one.seconds) for one in found] == [
        (Stage.INIT, "starts", 5.0),
        (Stage.ROLLOUT, "old", 60.0),
    ]
    assert found[1].quiet_seconds == 60.0

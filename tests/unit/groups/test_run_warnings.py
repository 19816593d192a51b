"""Runs whose request is allowed, and yet may not do what it is meant to do."""

from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.runs.live import LiveDelivery
from rollout_service.groups.auxiliary import run_warnings


def test_a_run_that_waits_for_groups_of_sessions_is_warned_of():
    request = RunRequest(source=InlineTasks(open=True), batch_size=2, live=LiveDelivery())
    (warning,) = run_warnings(request, None)
    assert warning.startswith("group_size: ")
    assert "group_size of 1" in warning
    assert run_warnings(request.model_copy(update={"group_size": 1}), None) == []
    assert run_warnings(request.model_copy(update={"live": None}), None) == []

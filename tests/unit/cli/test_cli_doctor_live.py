"""`doctor --live` names what is wrong, says so in its exit code, and is silent where nothing is."""

from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest

from api_schemas.errors import Boundary
from api_schemas.inference import BackendState
from api_schemas.nodes import HoldView, PressureView
from api_schemas.rollouts import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangReport, HangVerdict, StageWait
from api_schemas.views.overview import Overview
from api_schemas.views.summaries import ErrorGroup
from rollout_service.cli.console import SafeConsole
from rollout_service.cli.doctor.live_report import LiveReport
from rollout_service.cli.doctor.live_view import show
from tests.support.browser import canned

NOW = canned.now()


def report(hangs: dict[str, Any] | None = None, **changes: Any) -> LiveReport:
    """Return what is known of a service that works, with changes to its overview and its report of hangs."""
    calm: dict[str, Any] = {"backends": [canned.backend(1)], "nodes": [canned.node("a")], "errors": []}
    overview: Overview = canned.overview().model_copy(update=calm | changes)
    found: HangReport = canned.hang_report().model_copy(update={"findings": [], "at": NOW} | (hangs or {}))
    return LiveReport(found, overview)


def printed(live: LiveReport) -> str:
    with redirect_stdout(StringIO()) as output:
        show(live, SafeConsole(color=False), stacks=False)
    return output.getvalue()


def failed_engine(seconds: float, state: BackendState, error: str | None) -> Any:
    found = canned.backend(1, state)
    failed_at = NOW - timedelta(seconds=seconds)
    view = found.backend.model_copy(update={"failed_at": failed_at, "failures": 7, "last_error": error})
    return found.model_copy(update={"backend": view})


def test_a_service_that_works():
    live = report()
    assert not live.is_wrong
    assert printed(live).endswith("Nothing is stuck, slow or held back.\n")
    assert live.as_dict()["wrong"] is False


ERRORS = [
    ErrorGroup(
        code="backend_protocol_error",
        boundary=Boundary.INFERENCE,
        stage="rollout",
        count=12,
        last_at=NOW,
        message="logprob 0 is None",
        hint="See the engine's log.",
    )
]
FULL_DISK = canned.node("a").model_copy(
    update={
        "holds": [HoldView(resource="disk", reason="disk: 0.0 GiB free in /state")],
        "pressure": PressureView(disk_free_bytes={"/state": 0}),
    }
)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"ready": False, "reasons": ["no backend is in service"]}, ["not ready: no backend is in service"]),
        (
            {"backends": [failed_engine(3.5, BackendState.FAILED, "answers HTML")]},
            ["is failed, 7 failures, the last 3 s ago: answers HTML"],
        ),
        (
            {"backends": [failed_engine(3.5, BackendState.READY, None)]},
            ["is ready, 7 failures, the last 3 s"],
        ),
        (
            {"errors": ERRORS, "outcomes": {"backend_protocol_error": 12, "completed": 3}},
            ["12 rollouts failed with backend_protocol_error", "logprob 0 is None", "See the engine's log."],
        ),
        ({"nodes": [FULL_DISK]}, ["disk: 0.0 GiB free in /state", "free: 0.0 GiB at a:/state"]),
    ],
)
def test_what_is_wrong_is_said_although_nothing_is_stuck(changes, texts):
    live = report(**changes)
    assert live.is_wrong
    assert "Nothing is stuck" not in printed(live)
    for text in texts:
        assert text in printed(live)
    assert live.as_dict()["wrong"] is True


def test_an_engine_that_failed_a_while_ago_and_serves_again_is_shown_only():
    live = report(backends=[failed_engine(100, BackendState.READY, None)])
    assert not live.is_wrong
    assert "the last 100 s ago" in printed(live)
    assert len(live.as_dict()["service"]["engines"]) == 1
    assert report(backends=[failed_engine(400, BackendState.READY, None)]).failing() == []


def test_warnings_are_shown_and_are_faults():
    live = report(warnings=["an environment cannot be used"])
    assert live.is_wrong
    assert "warning: an environment cannot be used" in printed(live)


def test_the_oldest_wait_of_each_stage_is_shown_before_it_is_remarkable():
    wait = StageWait(
        stage=Stage.EVALUATE,
        kind=StepKind.GRADER,
        name="code",
        seconds=61.0,
        quiet_seconds=59.0,
        rollout_id="r-9",
    )
    live = report({"oldest": [wait]})
    [line] = [line for line in printed(live).splitlines() if "r-9" in line]
    assert line.split() == ["evaluate", "grader", "code", "61", "59", "r-9"]
    assert live.as_dict()["oldest"][0]["rollout_id"] == "r-9"


@pytest.mark.parametrize(
    ("kind", "verdict", "is_wrong"),
    [
        (StepKind.GRADER, HangVerdict.IDLE, True),
        (StepKind.TOOL, HangVerdict.IDLE, False),
        (StepKind.ENGINE, HangVerdict.SLOW, False),
        (StepKind.ENGINE, HangVerdict.STUCK, True),
        (StepKind.PAUSED_POOL, HangVerdict.HELD, False),
        ("run", HangVerdict.SLOW, True),
    ],
)
def test_which_findings_need_a_person(kind, verdict, is_wrong):
    finding = canned.finding().model_copy(update={"kind": kind, "verdict": verdict})
    assert report({"findings": [finding]}).is_wrong is is_wrong


def test_the_report_that_a_blocked_service_left():
    live = LiveReport(canned.hang_report().model_copy(update={"source": "state_folder"}))
    assert live.is_wrong
    assert live.as_dict()["service"] is None
    assert printed(live).startswith("The service does not answer; this is the report")

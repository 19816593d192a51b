"""`doctor` checks a machine, and with `--live` what a running service is stuck in."""

import json
import resource
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from api_schemas.errors import Boundary
from api_schemas.inference import BackendState
from api_schemas.nodes import HoldView, PressureView
from api_schemas.rollouts import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangReport, HangVerdict, StageWait
from api_schemas.views.overview import Overview
from api_schemas.views.summaries import ErrorGroup
from rollout_service.cli import app
from rollout_service.cli.common import CommandError
from rollout_service.cli.console import SafeConsole
from rollout_service.cli.doctor.batch import Tokens, write_tokens
from rollout_service.cli.doctor.checks import check_engine, check_mounts, check_open_files
from rollout_service.cli.doctor.live import LiveReport, show
from rollout_service.settings import Settings
from sandboxes import ApptainerConfig, LimitDefaults, LocalConfig
from sandboxes.host.facts import HostFacts, read_host_facts
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
            {"backends": [failed_engine(-0.5, BackendState.FAILED, None)]},  # since the report of what hangs
            ["is failed, 7 failures, the last 0 s ago"],
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


@pytest.fixture
def facts() -> HostFacts:
    return read_host_facts({"PATH": ""})


def test_a_backend_of_an_unknown_kind_is_named_with_its_setting():
    backends = [{"url": "http://gpu-1:30000"}, {"url": "http://gpu-2:30000", "kind": "vlm"}]
    check = check_engine(Settings.model_validate({"backends": backends}))
    assert check.state == "missing"
    assert check.found == "backends.1.kind: there is no kind of engine 'vlm'; did you mean vllm?"
    assert check.fix.startswith("Known kinds: sglang, vllm.")


def test_root_without_the_capability_to_mount_is_warned(facts):
    (found,) = check_mounts(replace(facts, is_root=True, sys_admin=False))
    assert (found.state, found.name) == ("missing", "mounting images")
    assert "CAP_SYS_ADMIN" in found.found
    assert "--cap-add SYS_ADMIN" in found.fix
    (found,) = check_mounts(replace(facts, is_root=True, sys_admin=True, fuse=False))
    assert found.state == "ok"


def test_a_table_of_open_files_that_two_sandboxes_can_fill_is_named(facts, tmp_path):
    limits = LimitDefaults(max_processes=512)
    settings = Settings(sandbox=ApptainerConfig(limits=limits), state_dir=tmp_path)
    each = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    (found,) = check_open_files(replace(facts, max_open_files=2 * 512 * each), settings)
    assert found.state == "limited"
    assert f"fs.file-max is {2 * 512 * each}" in found.found
    enough = int(found.fix.rpartition("=")[2])
    assert enough > settings.sandbox_ceiling * 512 * each
    (found,) = check_open_files(replace(facts, max_open_files=enough), settings)
    assert (found.state, found.fix) == ("ok", "")


def test_open_files_are_judged_only_where_they_are_known_and_bounded(facts, tmp_path):
    apptainer = Settings(sandbox=ApptainerConfig(), state_dir=tmp_path)
    local = Settings(sandbox=LocalConfig(provider="local"), state_dir=tmp_path)
    assert list(check_open_files(replace(facts, max_open_files=None), apptainer)) == []
    assert list(check_open_files(replace(facts, max_open_files=1), local)) == []


@pytest.mark.parametrize(
    ("embedded", "fix"),
    [
        ({"model": "/nowhere"}, "rollout-service serve --model calc-tuned"),
        ({"pools": {"frozen-1": "/nowhere"}}, "rollout-service serve --pool-model frozen-1=calc-tuned"),
    ],
)
def test_a_model_of_an_embedded_engine_that_is_not_there_is_named(embedded, fix):
    check = check_engine(Settings.model_validate({"embedded": embedded}))
    assert (check.state, check.found, check.fix) == ("missing", "there is no policy /nowhere", fix)


def test_the_embedded_engines_are_fine_with_shipped_models():
    settings = Settings.model_validate({"embedded": {"pools": {"frozen-1": "calc-base"}}})
    assert check_engine(settings).state == "ok"


def test_the_checks_are_of_the_state_folder_that_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["doctor", "--json", "--state-dir", str(tmp_path / "state")])
    (found,) = [check for check in json.loads(result.stdout) if check["name"] == "state folder"]
    assert str(tmp_path) in found["found"]


def test_stacks_without_a_service_are_refused():
    result = CliRunner().invoke(app, ["doctor", "--stacks"])
    assert result.exit_code == 1
    assert "Add --live." in result.stderr


def test_a_file_for_tokens_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(CommandError, match="cannot be written"):
        write_tokens(Tokens(*[np.zeros(1)] * 6), tmp_path / "no-folder" / "tokens.jsonl")

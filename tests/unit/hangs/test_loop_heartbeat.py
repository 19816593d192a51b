"""The thread names what blocks the event loop while it does, and takes its report back afterwards."""

import asyncio
import json
import os
import signal
import stat
import time
from datetime import UTC, datetime
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from api_schemas.views.hangs import HangReport
from rollout_service.server.hangs.heartbeat import BLOCKED_SECONDS, LoopHeartbeat
from rollout_service.server.hangs.last_report import FILE, STACKS, LastReport, read_last_report
from rollout_service.server.hangs.watch import dumping_stacks

EMPTY = HangReport(node="n", at=datetime.now(UTC), working=1, loop_lag_seconds=0.0)


def watched(path: Path) -> HangReport:
    """Wait in a thread until a report is there."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if (report := read_last_report(path)) is not None:
            return report
        time.sleep(0.01)
    raise AssertionError("no report was written")


def block_until(is_seen: list[HangReport]) -> None:
    """Keep the event loop until the report of that is there."""
    deadline = time.monotonic() + 15
    while not is_seen and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.slow
async def test_a_blocked_loop_is_reported_while_it_is_blocked(tmp_path):
    heartbeat = LoopHeartbeat(LastReport(tmp_path), lambda task: "r" if task is mine else None)
    heartbeat.report = EMPTY
    mine = asyncio.current_task()
    seen: list[HangReport] = []
    (tmp_path / FILE).write_text("left by a service that was killed")
    with heartbeat.running():
        assert not (tmp_path / FILE).exists()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, lambda: seen.append(watched(tmp_path)))
            await anyio.sleep(0.3)
            assert heartbeat.lag < BLOCKED_SECONDS
            block_until(seen)
        [report] = seen
        assert report.source == "state_folder"
        [finding] = report.findings
        assert (finding.kind, finding.verdict, finding.responds) == ("event_loop", "stuck", False)
        assert finding.subject.startswith("block_until (")
        assert "test_loop_heartbeat.py" in finding.subject
        assert finding.rollouts == ["r"]
        assert finding.seconds > BLOCKED_SECONDS
        assert any(frame.function == "block_until" for frame in finding.stack)
        assert report.loop_lag_seconds > BLOCKED_SECONDS
        with anyio.fail_after(5):
            while (tmp_path / FILE).exists() or not heartbeat.recent():
                await anyio.sleep(0.01)
        [block] = heartbeat.recent()
        assert block.finding_id == finding.finding_id
        assert block.finding().responds is True
        assert heartbeat.lag > BLOCKED_SECONDS


async def test_the_file_is_for_its_owner_alone_and_goes_with_the_block(tmp_path):
    last = LastReport(tmp_path)
    last.write(EMPTY)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert json.loads((tmp_path / FILE).read_text())["node"] == "n"
    with LoopHeartbeat(last, lambda _: None).running():
        await anyio.lowlevel.checkpoint()
    assert not (tmp_path / FILE).exists()
    assert read_last_report(tmp_path) is None


def test_a_report_that_cannot_be_written_or_read_is_no_error(tmp_path):
    LastReport(tmp_path / "gone").write(EMPTY)
    (tmp_path / FILE).write_text("{")
    assert read_last_report(tmp_path) is None


def test_a_signal_writes_the_stacks_of_all_threads(tmp_path):
    path = tmp_path / STACKS
    with dumping_stacks(path):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert "test_a_signal_writes_the_stacks_of_all_threads" in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

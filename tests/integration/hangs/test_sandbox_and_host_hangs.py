"""Commands, sandboxes, the store and the host: what hangs is named, and what works or waits its turn is not."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import psutil
import pytest

from api_schemas.rollouts import RolloutState
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangVerdict
from sandboxes import ApptainerConfig
from tests.support.hangs.service import HangService, engine_of, hang_service

pytestmark = pytest.mark.timeout(180)

IGNORES_SIGNALS = "trap '' INT TERM HUP QUIT; sleep 1000"
WORKS = "end=$((SECONDS + 27)); while ((SECONDS < end)); do for i in {1..5000}; do :; done; sleep 0.1; done"
LOCK = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


async def sandbox_of(service: HangService, rollout_id: str) -> tuple[str, int]:
    """Return the id of a rollout's sandbox, and its process, once its command runs."""
    with anyio.fail_after(60):
        while True:
            for sandbox in await service.client.sandboxes():
                if sandbox.label == rollout_id and sandbox.pid is not None:
                    waits = (await service.client.activity(rollout_id)).waits
                    if waits and waits[-1].kind == StepKind.TOOL:
                        return sandbox.id, sandbox.pid
            await anyio.sleep(0.05)


async def test_a_command_that_ignores_signals_and_one_that_works(tmp_path):
    async with (
        engine_of(IGNORES_SIGNALS) as engine,
        engine_of(WORKS) as busy,
        engine_of("true") as quick,
        hang_service(tmp_path, [engine]) as service,
    ):
        await service.add_backend(busy.url, "busy")
        await service.add_backend(quick.url, "quick")
        await service.makes_history("quick")
        await service.submit("works", pool="busy")
        await service.submit("hangs")
        found = await service.finding(lambda one: one.verdict is HangVerdict.STUCK)
        assert (found.kind, found.subject) == (StepKind.TOOL, "bash")
        assert found.responds is True
        assert found.rollouts == ["hangs"]
        assert (found.stage, found.environment) == ("rollout", "commands")
        assert str(found.detail["command"]).startswith("trap")
        assert found.detail["sandbox"]
        assert found.usual is not None
        assert any(frame.file == "sandboxes/sessions/bash.py" for frame in found.stack)
        finished = await service.client.wait("works", timeout_seconds=60)
        assert finished.state is RolloutState.COMPLETED, finished.error
        [span] = [span for span in finished.spans if span.stage == "rollout"]
        assert span.tool_seconds > 25
        await service.client.cancel("hangs")
        await service.ended(found.finding_id)


@contextmanager
def locked(database: Path) -> Iterator[None]:
    """Let another process hold the store's lock for writing."""
    command = [sys.executable, "-c", LOCK, str(database)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"locked\n"
        try:
            yield
        finally:
            holder.stdin.close()
            holder.wait(30)


async def test_a_store_that_another_program_has_locked(tmp_path):
    async with engine_of("sleep 2") as engine, hang_service(tmp_path, [engine]) as service:
        await service.submit("r")
        await sandbox_of(service, "r")
        with locked(tmp_path / "state" / "rollouts.sqlite3"):
            found = await service.finding(lambda one: one.kind == StepKind.STORE)
            assert (found.verdict, found.responds) == (HangVerdict.STUCK, False)
            assert (found.subject, found.rollouts) == ("store", ["r"])
            assert "no longer answers" in found.message
            explained = await service.finding(lambda one: "locked" in one.message)
            assert explained.finding_id == found.finding_id
            assert "holds the file locked" in found.hint
            assert (await service.client.activity("r")).waits[-1].kind == StepKind.STORE
        assert (await service.client.wait("r", timeout_seconds=60)).state is RolloutState.COMPLETED
        assert [event.kind for event in await service.ended(found.finding_id)] == ["hang.began", "hang.ended"]


async def test_a_host_that_takes_no_more_sandboxes_holds_rollouts(tmp_path):
    sandboxes = {"ceiling": 2, "pressure": {"enabled": False}, "warm": {"size": 0}}
    async with (
        engine_of("while :; do :; done") as engine,
        hang_service(tmp_path, [engine], sandboxes=sandboxes) as service,
    ):
        await service.submit("first")
        await sandbox_of(service, "first")
        await service.submit("second")
        found = await service.finding(lambda one: True)
        assert (found.kind, found.verdict, found.subject) == (StepKind.HOST, HangVerdict.HELD, "host")
        assert found.rollouts == ["second"]
        assert "ceiling: 1 of 2 sandboxes are in use" in found.message
        assert "/v1/nodes" in found.hint
        await service.client.cancel("first")
        await service.ended(found.finding_id)
        await service.client.cancel("second")


@pytest.mark.apptainer
async def test_apptainer_sandboxes_that_answer_are_told_from_those_that_do_not(tmp_path):
    async with (
        engine_of(IGNORES_SIGNALS) as engine,
        engine_of("sleep 1000") as other,
        hang_service(tmp_path, [engine], sandbox=ApptainerConfig()) as service,
    ):
        await service.add_backend(other.url, "other")
        await service.submit("command")
        await service.submit("sandbox", pool="other")
        sandbox_id, pid = await sandbox_of(service, "sandbox")
        launcher = psutil.Process(pid)
        stopped = [launcher, *launcher.children(recursive=True)]
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            gone = await service.finding(lambda one: one.responds is False)
            command = await service.finding(lambda one: one.responds is True)
        finally:
            for process in reversed(stopped):
                process.send_signal(signal.SIGCONT)
        assert (gone.verdict, gone.subject, gone.rollouts) == (HangVerdict.STUCK, sandbox_id, ["sandbox"])
        assert (command.verdict, command.subject, command.rollouts) == (HangVerdict.IDLE, "bash", ["command"])
        for rollout_id in ("command", "sandbox"):
            await service.client.cancel(rollout_id)
        await service.ended(gone.finding_id)
        await service.ended(command.finding_id)

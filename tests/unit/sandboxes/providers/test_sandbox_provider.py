"""A start that fails leaves nothing, and the conformance command names the promises that a provider breaks."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer import Typer
from typer.testing import CliRunner

from sandboxes import (
    LocalConfig,
    SandboxClosedError,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
    SandboxStartError,
)
from sandboxes.conformance import CHECKS
from sandboxes.conformance.__main__ import main
from sandboxes.host.processes import find_processes
from sandboxes.providers.base import LOG_BYTES, LaunchLog, LaunchPlan
from sandboxes.providers.local import LocalProvider
from tests.support.processes.children import children, held

SEEK = f"{sys.executable} -c 'import os; os.lseek(1, 1 << 60, 0)'"


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Return a folder outside pytest's, whose path is too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        yield Path(folder)


@pytest.fixture
async def provider(run_dir: Path, tmp_path: Path) -> AsyncIterator[LocalProvider]:
    made = LocalProvider(LocalConfig(provider="local", run_dir=run_dir), tmp_path / "state")
    yield made
    await made.close()


def left(run_dir: Path) -> list[object]:
    """Return the folders and processes of sandboxes of the services below a folder."""
    services = {path.name for path in run_dir.iterdir()}
    return [*run_dir.glob("*/[0-9]*"), *find_processes(lambda mark: mark.split("-")[0] in services)]


@pytest.mark.parametrize(
    ("script", "size"),
    [
        ("printf hello", 5),
        ("printf out; printf err >&2", 6),
        ("head -c 9000000 /dev/zero", LOG_BYTES),
        (SEEK, LOG_BYTES),
    ],
)
def test_the_output_of_a_launcher_is_bounded(tmp_path, script, size):
    """An image's own bash writes there, and may be hostile."""
    with LaunchLog() as log:
        subprocess.run(["bash", "-c", script], stdout=log.descriptor, stderr=log.descriptor, check=False)
        log.save(tmp_path / "log")
        assert os.fstat(log.descriptor).st_size == LOG_BYTES
    assert (tmp_path / "log").stat().st_size == size


@pytest.mark.slow
@pytest.mark.parametrize("step", ["_wait_until_ready", "_make_launched", "make_sandbox"])
async def test_a_failure_after_the_launch_leaves_nothing(provider, run_dir, monkeypatch, step):
    def fail(*_: object) -> None:
        raise RuntimeError("no thread can be started")

    with monkeypatch.context() as patched:
        patched.setattr(provider, step, fail)
        with pytest.raises(RuntimeError, match="no thread"):
            await provider.start(SandboxSpec())
    assert provider.live() == []
    assert left(run_dir) == []
    async with await provider.start(SandboxSpec()) as sandbox:
        assert (await sandbox.exec(["true"])).exit_code == 0


@pytest.mark.parametrize("step", ["plan", "_wait_until_ready"])
async def test_a_start_under_way_when_the_provider_closes_makes_no_sandbox(provider, run_dir, monkeypatch, step):
    original, there, closed = getattr(provider, step), anyio.Event(), anyio.Event()

    async def held_up(*arguments: object) -> object:
        found = await original(*arguments)
        there.set()
        await closed.wait()
        return found

    async def start() -> None:
        with pytest.raises(SandboxError):
            await provider.start(SandboxSpec())

    monkeypatch.setattr(provider, step, held_up)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start)
        await there.wait()
        await provider.close()
        closed.set()
    assert provider.live() == []
    assert left(run_dir) == []


async def test_a_provider_that_closes_while_a_saved_shell_is_read_has_no_sandbox(provider, run_dir, monkeypatch):
    plan = provider.plan

    async def can_save(*arguments: Any) -> LaunchPlan:
        return replace(await plan(*arguments), save_command=lambda _launcher, _limit: [])

    def read(_saved: Path) -> bytes:
        anyio.from_thread.run(provider.close)
        return b""

    monkeypatch.setattr(provider, "plan", can_save)
    monkeypatch.setattr("sandboxes.providers.base.read_state", read)
    with pytest.raises(SandboxClosedError):
        await provider.start(SandboxSpec(saved=run_dir))
    assert provider.live() == []


async def test_a_host_that_fails_before_the_launch_fails_the_start(provider, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(provider, "plan", full)
    with pytest.raises(SandboxStartError, match="No space left"):
        await provider.start(SandboxSpec())


async def test_a_launcher_without_a_control_shell_is_collected(provider, run_dir, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("no reader can be added")

    await (await provider.start(SandboxSpec())).close()
    before = children()
    with monkeypatch.context() as patched:
        patched.setattr("sandboxes.providers.base.ControlShell", fail)
        with pytest.raises(SandboxError, match="no reader"):
            await provider.start(SandboxSpec())
    assert children() == before
    assert left(run_dir) == []


async def test_a_launcher_that_outlives_its_kill_is_collected_by_a_later_release(provider, run_dir):
    sandbox = await provider.start(SandboxSpec())
    assert sandbox.info.pid is not None
    with held(sandbox.info.pid):
        await sandbox.close()
        assert provider.lingering == 1
        assert len(left(run_dir)) == 1, "its folder stays"
    await (await provider.start(SandboxSpec())).close()
    assert provider.lingering == 0
    assert sandbox.info.pid not in children()
    assert left(run_dir) == []


async def test_the_end_of_a_provider_waits_for_a_launcher_that_outlives_its_kill(provider, run_dir):
    sandbox = await provider.start(SandboxSpec())
    assert sandbox.info.pid is not None
    async with anyio.create_task_group() as tasks:
        with held(sandbox.info.pid):
            await sandbox.close()
            tasks.start_soon(provider.close)
            await anyio.sleep(0.1)
    assert provider.lingering == 0
    assert sandbox.info.pid not in children()
    assert left(run_dir) == []


def test_a_list_of_hosts_makes_a_kind_like_a_tuple():
    assert SandboxSpec(network=["a.example"]).network == ("a.example",)
    assert SandboxSpec(network=["a.example"]) == SandboxSpec(network=("a.example",))


app = Typer()
app.command()(main)
HERE = "tests.unit.sandboxes.providers.test_sandbox_provider"


class Claims(LocalProvider):
    """Lists a failure that does not exist, and omits one that does."""

    known_failures = {"exec_at_once": "it was so once"}  # type: ignore[assignment]


def honest(state: Path) -> SandboxProvider:
    return LocalProvider(LocalConfig(provider="local"), state)


def dishonest(state: Path) -> SandboxProvider:
    return Claims(LocalConfig(provider="local"), state)


def no_provider(state: Path) -> str:
    return "none"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_a_custom_provider_is_checked(tmp_path):
    report = tmp_path / "report.json"
    checks = ("--check", "exec_at_once", "--check", "no_rights", "--check", "hidden_network")
    code, output = run(f"{HERE}:honest", *checks, "--json", str(report))
    assert code == 0, output
    found = json.loads(report.read_text())
    assert found["conforms"] is True
    verdicts = {outcome["check"]: outcome["verdict"] for outcome in found["outcomes"]}
    assert verdicts == {
        "exec_at_once": "holds",
        "hidden_network": "known failure",
        "no_rights": "known failure",
    }


def test_an_undeclared_failure_fails_and_a_fixed_one_is_shown():
    code, output = run(f"{HERE}:dishonest", "--check", "exec_at_once", "--check", "hidden_network")
    assert code == 1
    assert "holds now exec_at_once" in output
    assert "fails hidden_network" in output


@pytest.mark.parametrize(
    "arguments",
    [("local", "--check", "nope"), (f"{HERE}:nope",), ("no_module_of_this:x",), (f"{HERE}:no_provider",)],
)
def test_an_unusable_provider_or_check_is_not_a_failed_check(arguments):
    code, _ = run(*arguments)
    assert code == 2


def test_the_list_names_every_check():
    code, output = run("local", "--list")
    assert code == 0
    assert all(check.__name__ in output for check in CHECKS)
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)
    assert all(check.__doc__ for check in CHECKS)

"""A start that fails at any point leaves nothing: no process and no folder."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from sandboxes import LocalConfig, SandboxError, SandboxSpec
from sandboxes.host.processes import find_processes
from sandboxes.providers.local import LocalProvider
from tests.support.processes.children import children, held


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
async def test_a_start_under_way_when_the_provider_closes_makes_no_sandbox(
    provider, run_dir, monkeypatch, step
):
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

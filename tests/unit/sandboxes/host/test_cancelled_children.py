"""A cancelled child is always collected, whichever step of its start or life the cancellation hits."""

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from rollout_service.cli.server_child import running_server
from rollout_service.engines.local_servers.process import ServerCommand, ServerProcess
from sandboxes.runtime.export import export_tree
from tests.support.processes.children import nothing_uncollected

pytestmark = pytest.mark.slow


class Sleeping(ServerProcess):
    """A server that never serves."""

    def _server_command(self, folder: Path) -> ServerCommand:
        return ServerCommand(["sleep", "60"], {"PATH": "/usr/bin:/bin"}, lambda: None)


async def read_export(_: Path) -> None:
    async for _part in export_tree("/anything", ["sleep", "60"]):
        pass


async def start_engine(_: Path) -> None:
    async with Sleeping():
        pass


async def start_server(folder: Path) -> None:
    async with running_server(folder):
        pass


@pytest.mark.parametrize(("work", "steps"), [(read_export, 25), (start_engine, 25), (start_server, 10)])
def test_a_cancellation_at_any_step_leaves_no_process(work, steps, tmp_path):
    async def cancelled_after(step: int) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, tmp_path)
            for _ in range(step):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    with nothing_uncollected():
        for step in range(steps):
            anyio.run(cancelled_after, step)


def test_only_one_function_starts_children():
    """Every other start could lose its process to a cancellation."""
    root = Path(__file__).parents[4]
    modules = [
        path for package in ("sandboxes", "rollout_service", "benchmarks") for path in (root / package).rglob("*.py")
    ]
    users = [str(path.relative_to(root)) for path in modules if "open_process" in path.read_text()]
    assert users == ["sandboxes/host/children.py"]

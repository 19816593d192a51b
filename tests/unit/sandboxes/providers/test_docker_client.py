"""A Docker daemon that hangs or fails holds up nothing else, and is never taken for the doing of code inside."""

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import anyio
import anyio.to_thread
import pytest

from sandboxes.config import DockerConfig
from sandboxes.contract import SandboxSpec
from sandboxes.errors import ProviderUnavailableError, SandboxClosedError, SandboxError, SandboxLostError
from sandboxes.providers.docker import Containers, DockerProvider, DockerSandbox

INFO = '{"MemoryLimit": true, "PidsLimit": true, "CpuCfsQuota": true}'


def make_client(folder: Path, script: str) -> str:
    docker = folder / "docker"
    docker.write_text(f"#!/bin/sh\n{script}\n")
    docker.chmod(0o755)
    return str(docker)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("exit 1", SandboxLostError),
        ('[ "$1" = ps ]', SandboxClosedError),
        ('[ "$1" = ps ] && echo container folder', SandboxLostError),
    ],
    ids=["silent", "no container", "no answer about it"],
)
async def test_only_a_daemon_that_answers_says_that_a_sandbox_has_ended(
    tmp_path: Path, script: str, error: type[SandboxError]
) -> None:
    containers = Containers(make_client(tmp_path, script), {"PATH": os.environ["PATH"]})
    with pytest.raises(error):
        await containers.count_processes("one")
    await containers.remove_sandbox("one")
    assert len((await containers.sweep())[1]) == (error is SandboxLostError)


@pytest.mark.parametrize(
    ("code", "closing", "is_lost"),
    [("exit 125", False, True), ("kill -9 $$", False, True), ("exit 137", False, False), ("kill -9 $$", True, False)],
)
def test_a_client_that_fails_before_the_close_is_a_loss(code: str, closing: bool, is_lost: bool) -> None:
    with subprocess.Popen(["sh", "-c", code]) as process:
        process.wait()
    sandbox = DockerSandbox.__new__(DockerSandbox)
    sandbox._closing = closing
    sandbox._launched = SimpleNamespace(id="one", resources=SimpleNamespace(process=process))
    assert isinstance(sandbox.loss, SandboxLostError) == is_lost


async def test_nothing_starts_before_the_daemon_has_said_which_limits_hold(tmp_path: Path) -> None:
    script = f"[ $1 != info ] || {{ [ -e {tmp_path}/up ] && echo '{INFO}'; }}"
    config = DockerConfig(provider="docker", binary=make_client(tmp_path, script))
    provider = DockerProvider(config, tmp_path / "state")
    assert provider.enforced == {"disk"}
    with pytest.raises(ProviderUnavailableError):
        await provider.start(SandboxSpec())
    (tmp_path / "up").touch()
    await provider.sweep()
    assert provider.enforced == {"memory", "processes", "cpus", "disk"}
    await provider.close()


async def test_clients_that_hang_take_no_thread_of_others(tmp_path: Path):
    release = tmp_path / "release"
    os.mkfifo(release)
    containers = Containers(make_client(tmp_path, f"read line <{release}"), {"PATH": os.environ["PATH"]})
    held = os.open(release, os.O_RDWR)
    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(int(anyio.to_thread.current_default_thread_limiter().total_tokens)):
                tasks.start_soon(containers.ask, "ps")
            await anyio.wait_all_tasks_blocked()
            try:
                with anyio.fail_after(5):
                    await anyio.to_thread.run_sync(time.time)
            finally:
                os.write(held, b"\n" * 1000)
    finally:
        os.close(held)

"""A Docker daemon that hangs or fails holds up nothing else, and is never taken for the doing of code inside."""

import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import psutil
import pytest

from sandboxes.config import DockerConfig
from sandboxes.contract import SandboxSpec
from sandboxes.errors import (
    LimitExceededError,
    ProviderUnavailableError,
    SandboxClosedError,
    SandboxError,
    SandboxLostError,
)
from sandboxes.host.children import wait_exit
from sandboxes.providers.docker import Containers, DockerProvider


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


CLIENT = """#!/bin/bash
case $1 in
  info) cat "$0.info" ;;
  image) echo sha256:1 ;;
  run)
    for flag; do case $flag in *target=/run/rollout/pipes,*) flag=${flag#*source=} pipes=${flag%%,*} ;; esac; done
    setsid bash --norc "$pipes/control.sh" "$pipes" / 0 0 answers
    exit 137 ;;
esac
"""
DOCKER, DOCKER_WITHOUT = '{"MemoryLimit": true, "PidsLimit": true, "CpuCfsQuota": true}', '{"MemoryLimit": true}'
PODMAN = '{"host": {"cgroupControllers": ["cpu", "io", "memory", "pids"]}}'
PODMAN_WITHOUT = '{"host": {"cgroupControllers": []}}'


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[DockerProvider]:
    """Yield a provider whose client runs the control shell without a container."""
    (client := tmp_path / "docker").write_text(CLIENT)
    client.chmod(0o755)
    (tmp_path / "docker.info").write_text(DOCKER)
    with tempfile.TemporaryDirectory(prefix="rs-") as run_dir:
        config = DockerConfig(provider="docker", binary=str(client), run_dir=Path(run_dir))
        found = DockerProvider(config, tmp_path / "state")
        yield found
        await found.close()


@pytest.mark.parametrize(("memory", "error"), [(False, SandboxLostError), (True, SandboxClosedError)])
async def test_a_container_that_ends_under_its_service_is_lost_but_not_one_out_of_memory(provider, memory, error):
    sandbox = await provider.start(SandboxSpec())
    if memory:
        sandbox._launched.monitor.record("memory")
    [shell] = psutil.Process(sandbox.pid).children()
    shell.kill()  # as a daemon does that shuts down
    with pytest.raises(error), anyio.fail_after(10):
        await sandbox.exec(["sleep", "1000"], cwd="/")
    await sandbox.close()
    with pytest.raises(SandboxClosedError):
        await sandbox.exec(["true"])


async def test_a_container_whose_time_is_over_is_not_lost(provider):
    async with await provider.start(SandboxSpec(lifetime_seconds=0.1)) as sandbox:
        for _ in range(2):
            with pytest.raises(LimitExceededError, match="lifetime"), anyio.fail_after(10):
                await sandbox.exec(["sleep", "1000"], cwd="/")
            await wait_exit(sandbox._launched.resources.process, 10)


@pytest.mark.parametrize(
    ("says", "then"),
    [("", DOCKER), ("[]", PODMAN), ("limits", DOCKER), (DOCKER_WITHOUT, DOCKER), (PODMAN_WITHOUT, PODMAN)],
)
async def test_nothing_starts_before_the_daemon_has_said_that_limits_hold(provider, tmp_path, says, then):
    (tmp_path / "docker.info").write_text(says)
    assert provider.enforced == {"disk"}
    with pytest.raises(ProviderUnavailableError, match=r"holds no limit on .*processes"):
        await provider.start(SandboxSpec())
    (tmp_path / "docker.info").write_text(then)
    await provider.sweep()
    assert provider.enforced == {"memory", "processes", "cpus", "disk"}


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

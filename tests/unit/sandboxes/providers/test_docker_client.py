"""A Docker daemon that hangs holds up nothing but what asks it."""

import os
import time
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxes.providers.docker import Containers


async def test_clients_that_hang_take_no_thread_of_others(tmp_path: Path):
    release = tmp_path / "release"
    os.mkfifo(release)
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\nread line <{release}\n")
    docker.chmod(0o755)
    containers = Containers(str(docker), {"PATH": os.environ["PATH"]})
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

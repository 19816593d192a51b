"""Other projects' sandboxes, measured by `programs/sandbox_peers.py`, each with what it needs on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import Process
from common import HERE, START_SECONDS

from rollout_service.cli.server_child import stop
from sandboxes.host.children import start_process
from sandboxes.host.facts import find_apptainer
from sandboxes.images.store import ImageStore

SCRIPTS = HERE.parent / "scripts"
FIGURES = ("run_p50_ms", "start_p50_s", "parallel_sleep_s", "time_outs")
DOCKER_IMAGE = "rollout-service/base"
SYSTEM_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""Where daemons are, too."""


@dataclass(frozen=True, slots=True)
class Setup:
    python: Path
    image: str
    variables: Mapping[str, str]


@asynccontextmanager
async def packages() -> AsyncIterator[Setup | None]:
    """Install the peers that are Python packages; those with images take our base image, by our Apptainer."""
    done = await anyio.run_process([str(SCRIPTS / "install-sandbox-peers")], stderr=None, check=False)
    if done.returncode:  # it has said why
        yield None
        return
    path = f"{find_apptainer().parent}:{os.environ.get('PATH', os.defpath)}"
    python = HERE.parent / ".venv-sandbox-peers" / "bin" / "python"
    yield Setup(python, str(ImageStore().resolve("base")), {"PATH": path})


@asynccontextmanager
async def docker_daemon() -> AsyncIterator[Setup | None]:
    """Run a Docker daemon without a network that has our base image; yield None where it cannot run."""
    if os.geteuid() != 0 or shutil.which("dockerd", path=SYSTEM_PATH) is None:
        sys.stderr.write("without Docker: it needs root and scripts/install-docker\n")
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rollout-docker-") as folder:
        variables = {"DOCKER_HOST": f"unix://{folder}/sock", "PATH": SYSTEM_PATH}
        environment, log = {**os.environ, **variables}, Path(folder) / "log"
        command = ["dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
        command += ["--pidfile", f"{folder}/pid", "--host", variables["DOCKER_HOST"]]
        command += ["--bridge=none", "--iptables=false"]
        with log.open("wb") as file:
            daemon = await start_process(command, stdout=file, stderr=file, env=environment, new_session=True)
        try:
            if await answers(daemon, environment):
                await anyio.run_process([str(SCRIPTS / "docker-image")], env=environment)
                yield Setup(Path(sys.executable), DOCKER_IMAGE, variables)
            else:
                sys.stderr.write(f"without Docker, whose daemon did not start: {log.read_text()[-2000:]}\n")
                yield None
        finally:
            await stop(daemon)


async def answers(daemon: Process, environment: Mapping[str, str]) -> bool:
    """Wait until the daemon answers; return False if it ends, or takes too long."""
    with anyio.move_on_after(START_SECONDS):
        while daemon.returncode is None:
            if not (await anyio.run_process(["docker", "info"], check=False, env=environment)).returncode:
                return True
            await anyio.sleep(0.1)
    return False


PEERS: Mapping[str, Callable[[], AbstractAsyncContextManager[Setup | None]]] = {
    "docker": docker_daemon,
    "inspect": packages,
    "nemo_gym": packages,
    "swerex": packages,
}


async def peer_figures(chosen: str, *amounts: int) -> dict[str, float | None]:
    """Measure the chosen peer, or all; the figures of the others are null, as of one that cannot run here."""
    figures: dict[str, float | None] = {}
    for peer, make in PEERS.items():
        found: Mapping[str, float] = {}
        if chosen in ("all", peer):
            async with make() as setup:
                found = {} if setup is None else await measured(peer, setup, *amounts)
        figures |= {f"{peer}_{name}": found.get(name) for name in FIGURES}
    return figures


async def measured(peer: str, setup: Setup, *amounts: int) -> Mapping[str, float]:
    """Run the program, which closes its sandboxes even if this is cancelled."""
    program = [setup.python, HERE / "programs" / "sandbox_peers.py", peer, setup.image, *amounts]
    process = await start_process(
        [str(word) for word in program], stdout=subprocess.PIPE, env={**os.environ, **setup.variables}
    )
    try:
        assert process.stdout is not None
        answer = b"".join([part async for part in process.stdout])
        if await process.wait():
            raise SystemExit(f"{peer} failed; its message is above")
    finally:
        await stop(process)
    figures: Mapping[str, float] = json.loads(answer)
    return figures

"""The Docker provider keeps the contract with a real daemon, started here, and leaves no containers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from sandboxes import SandboxProvider, SandboxSpec, make_provider
from sandboxes.config import DockerConfig, LimitDefaults
from sandboxes.conformance import CHECKS
from sandboxes.errors import (
    ImageNotFoundError,
    LimitExceededError,
    ProviderUnavailableError,
    SandboxConfigError,
)
from tests.support.sandbox_conformance import conforms

pytestmark = [
    pytest.mark.docker,
    pytest.mark.xdist_group("docker"),  # one daemon for all
    pytest.mark.timeout(300),
    pytest.mark.slow(seconds=170),
]
SCRIPTS = Path(__file__).parents[3] / "scripts"
START_SECONDS = 60.0


def docker(host: str, *arguments: str) -> str:
    done = subprocess.run(["docker", "--host", host, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a daemon without a network, whose state is all in a temporary folder."""
    folder = tmp_path_factory.mktemp("docker")
    host = f"unix://{folder}/sock"
    command = ["dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
    command += ["--pidfile", f"{folder}/pid", "--host", host, "--bridge=none", "--iptables=false"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while subprocess.run(["docker", "--host", host, "info"], capture_output=True).returncode != 0:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        subprocess.run([SCRIPTS / "docker-image"], check=True, env={**os.environ, "DOCKER_HOST": host})
        yield host
        assert docker(host, "ps", "--all", "--quiet") == ""
    finally:
        process.send_signal(signal.SIGTERM)  # it ends its containerd, too
        process.wait(30)


@pytest.fixture
async def provider(daemon: str, tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    limits = LimitDefaults(memory_bytes=1 << 30, max_processes=200, cpus=2)
    found = make_provider(DockerConfig(provider="docker", host=daemon, limits=limits), tmp_path)
    yield found
    await found.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_docker(provider, check):
    await conforms(check, provider)


async def test_limits_hold(provider):
    async with await provider.start(SandboxSpec(memory_bytes=64 << 20, max_processes=40)) as sandbox:
        assert provider.enforced == {"memory", "processes", "cpus", "disk"}
        hog = await sandbox.exec(["python3", "-c", "x = bytearray(200 << 20)"], timeout=30)
        assert hog.exit_code == 137
        assert [(violation.limit, str(violation)) for violation in hog.limit_violations] == [
            ("memory", "the sandbox ran out of memory (64 MiB), and a process in it was killed")
        ]
        with pytest.raises(LimitExceededError, match="memory"):
            await (await sandbox.python()).execute("x = bytearray(200 << 20)", timeout=30)
        bomb = await sandbox.exec(["bash", "-c", "for n in {1..80}; do sleep 5 & done; wait"], timeout=30)
        assert b"fork" in bomb.stderr
        assert (await (await sandbox.bash()).run("echo up")).output == "up\n"


async def test_an_image_is_known_by_what_it_is_and_has_the_name_that_environments_use(provider):
    found = await provider.identity(SandboxSpec(image="base"))
    assert found.startswith("sha256:")
    for same in (None, found, "rollout-service/base", "docker://rollout-service/base"):
        assert await provider.identity(SandboxSpec(image=same)) == found


async def test_a_specification_that_cannot_be_met_is_a_typed_error(provider, tmp_path):
    with pytest.raises(ImageNotFoundError, match="no-such-image"):
        await provider.start(SandboxSpec(image="no-such-image"))
    with pytest.raises(SandboxConfigError):
        await provider.start(SandboxSpec(image="--privileged"))
    with pytest.raises(SandboxConfigError):
        await provider.start(SandboxSpec(network=("example.com",)))
    nowhere = make_provider(DockerConfig(provider="docker", host=f"unix://{tmp_path}/none"), tmp_path)
    with pytest.raises(ProviderUnavailableError) as caught:
        await nowhere.start(SandboxSpec())
    assert "install-docker" in caught.value.hint
    await nowhere.close()


ABANDON = """
import os, sys, anyio
from pathlib import Path
from sandboxes import SandboxSpec, make_provider
from sandboxes.config import DockerConfig

async def main():
    provider = make_provider(DockerConfig(provider="docker", host=sys.argv[1]), Path(sys.argv[2]))
    sandbox = await provider.start(SandboxSpec())
    await (await sandbox.bash()).run("sleep 1000 & disown")
    print("started", flush=True)
    await anyio.sleep(1000)

anyio.run(main)
"""


async def test_a_service_that_is_killed_leaves_no_container(daemon, provider, tmp_path):
    own = await provider.start(SandboxSpec())
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", ABANDON, daemon, str(tmp_path / "other")], stdout=subprocess.PIPE
    ) as service:
        assert service.stdout.readline() == b"started\n"
        assert len(docker(daemon, "ps", "--quiet").split()) == 2
        service.kill()
    deadline = time.monotonic() + 5
    while len(docker(daemon, "ps", "--all", "--quiet").split()) > 1:
        assert time.monotonic() < deadline, docker(daemon, "ps", "--all")
        await anyio.sleep(0.1)
    # A container that its `docker run` could not end, as after a power cut, is found by its label; a live one is not.
    stale = docker(
        daemon, "run", "--detach", "--network", "none", "--label", f"rollout-service.folder={tmp_path}/gone",
        "--label", "rollout-service.sandbox=gone-1", "rollout-service/base", "sleep", "1000",
    ).strip()  # fmt: skip
    assert (await provider.sweep()).sandboxes == 1
    assert stale[:12] not in docker(daemon, "ps", "--all", "--quiet")
    assert (await (await own.bash()).run("echo up")).output == "up\n"
    await own.close()

"""The container file of deploy/container builds without a daemon, and the service starts from its image."""

import shutil
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from sandboxes.host.facts import find_apptainer
from sandboxes.images.store import ImageStore
from tests.support.pages.blocks import ROOT

pytestmark = [
    pytest.mark.extended("deploy/container/", "pyproject.toml", "scripts/install-apptainer"),
    pytest.mark.apptainer,
    pytest.mark.timeout(900),
    pytest.mark.slow(seconds=200),
]
READY_SECONDS = 90.0
BASE = """FROM base
COPY certificates /etc/test-certificates
RUN echo 'Acquire::Check-Valid-Until "false";' >/etc/apt/apt.conf.d/99test \\
    && printf '[global]\\ncert = /etc/test-certificates\\n' >/etc/pip.conf
"""
"""A Debian like the one of the registry, which this machine may not reach, that trusts what this machine trusts, and
takes packages from a mirror that is behind."""


def build(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "rollout_service.cli", "image", "build", *arguments]
    folders = {"ROLLOUT_IMAGES_DIR": str(folder), "ROLLOUT_LAYERS_DIR": str(folder / "layers")}
    paths = {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(Path.home()),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(command, env=paths | folders, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    context = tmp_path_factory.mktemp("base")
    (context / "Dockerfile").write_text(BASE)
    shutil.copyfile(ssl.get_default_verify_paths().cafile or "/dev/null", context / "certificates")
    build(folder, str(context), "--name", "debian", "--base", f"base={ImageStore().resolve('base')}")
    file = str(ROOT / "deploy/container/Containerfile")
    base = f"debian:12-slim={folder / 'debian.sif'}"
    build(folder, file, "--context", str(ROOT), "--name", "service", "--base", base)
    return folder / "service.sif"


def test_the_service_starts_from_the_image(image, tmp_path):
    flags = ["--port", "0", "--sandbox", "local", "--state-dir", "/tmp/state", "--port-file", "/out/address"]
    spaces = ["--userns", "--containall", "--cleanenv", "--writable-tmpfs", "--bind", f"{tmp_path}:/out"]
    inside = [str(image), "rollout-service", "serve", *flags]
    address, log = tmp_path / "address", tmp_path / "log"
    with (
        log.open("w") as output,
        subprocess.Popen([str(find_apptainer()), "exec", *spaces, *inside], stdout=output, stderr=output) as service,
    ):
        try:
            until = time.monotonic() + READY_SECONDS
            while not (address.exists() and is_ready(address.read_text())):
                assert service.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.2)
        finally:
            service.terminate()


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/ready").is_success
    except httpx.TransportError:  # it does not listen yet, or the machine is busy
        return False


def test_the_image_has_apptainer(image):
    """Sandboxes within a container need rights that this test does not have."""
    command = [str(find_apptainer()), "exec", "--userns", "--containall", "--cleanenv", str(image)]
    done = subprocess.run([*command, "apptainer", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("apptainer version")

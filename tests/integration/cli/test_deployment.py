"""The guide of deployment and a command's own server keep their promises."""

import getpass
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rollout_service.cli.server_child import running_server
from rollout_service.server.api.routes import rollouts, runs
from rollout_service.settings import Settings, load_own_settings
from tests.support.api.server import api_server

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "deploy" / "systemd" / "rollout-service.service"
CONNECTIONS_SECONDS = 3
MAX_EXPOSURE = 4.0
PAGE = (ROOT / "docs" / "how-to" / "deploy.md").read_text()
KEY = "a-key-of-enough-characters-for-anyone"


def test_the_unit_is_valid(tmp_path):
    """Replace the program's path and its user, which differ between deployments."""
    text = UNIT.read_text().replace("User=rollout\n", f"User={getpass.getuser()}\n")
    text = re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", text)
    (tmp_path / UNIT.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if UNIT.stem in line]
    assert (done.returncode, complaints) == (0, []), done.stderr


def test_the_unit_leaves_little_open():
    """Rate it as `systemd-analyze` does: from 0, which is best, to 10."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNIT)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Overall exposure level.*: ([\d.]+)", done.stdout)
    assert found
    assert float(found[1]) < MAX_EXPOSURE, done.stdout


def test_the_unit_waits_longer_than_a_shutdown_takes():
    found = re.search(r"(?m)^TimeoutStopSec=(\d+)$", UNIT.read_text())
    assert found
    assert int(found[1]) > Settings().pipeline.drain_seconds + CONNECTIONS_SECONDS


def test_a_proxy_outlasts_every_wait_and_accepts_every_body():
    """If both times were equal, nginx would answer first, with a 504."""
    found = re.search(r"proxy_read_timeout (\d+)s;", PAGE)
    assert found
    assert int(found[1]) > max(rollouts.MAX_WAIT_SECONDS, runs.MAX_WAIT_SECONDS)
    found = re.search(r"client_max_body_size (\d+)m;", PAGE)
    assert found
    assert int(found[1]) << 20 >= Settings().max_body_bytes


def test_probes_answer_without_a_key_to_an_address_and_to_listed_names(tmp_path):
    hosts = '["rollouts.example.com"]'
    with api_server(tmp_path, ROLLOUT_KEYS=KEY, ROLLOUT_ALLOWED_HOSTS=hosts) as server:
        for path, status in [("/health", 200), ("/ready", 503)]:
            assert httpx.get(server.url + path).status_code == status
            for host, named in [("rollouts.example.com", status), ("other.example.com", 421)]:
                assert httpx.get(server.url + path, headers={"host": host}).status_code == named
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).is_success


SETTINGS = """
host = "0.0.0.0"
port = 80
keys_file = "/nowhere/keys.toml"
path_prefix = "/rollouts"
tls_certificate = "/nowhere/certificate.pem"
log_format = "json"

[[keys]]
name = "team"
role = "admin"
key = "team-key-0123456789"

[store]
url = "redis://127.0.0.1:9/0"

[cluster]
name = "gpu-1"

[gateway]
port = 81
obey_sampling = true

[pipeline]
init_workers = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, which has the settings of a service."""
    (tmp_path / "rollout.toml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_has_the_users_settings_but_those_of_a_service_for_others(folder, monkeypatch):
    monkeypatch.setenv("ROLLOUT_KEYS", "another-key-0123456789")
    monkeypatch.setenv("ROLLOUT_STORE__PREFIX", "others")
    monkeypatch.setenv("ROLLOUT_PIPELINE__ROLLOUT_WORKERS", "7")
    settings = load_own_settings(port=0, state_dir=folder / "state")
    assert (settings.host, settings.port, settings.is_keyed, settings.path_prefix) == (
        "127.0.0.1",
        0,
        False,
        "",
    )
    assert (settings.tls_certificate, settings.store.url, settings.store.prefix) == (None, [], "rollouts")
    assert (settings.cluster.name, settings.gateway.port) == (None, 0)
    assert settings.gateway.obey_sampling
    assert (settings.pipeline.init_workers, settings.pipeline.rollout_workers) == (3, 7)


@pytest.mark.slow
async def test_a_command_uses_its_own_server_in_the_folder_of_a_service(folder):
    flags = ["--sandbox", "local", "--model", "calc-tuned"]
    async with running_server(folder / "state", flags) as client:
        assert "calc" in {one.name for one in await client.environments()}
        assert [one.node for one in await client.nodes()] != ["gpu-1"]

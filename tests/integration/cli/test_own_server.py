"""A server that a command starts for itself has nothing of a service for others, whatever the user's settings say."""

from pathlib import Path

import pytest

from rollout_service.cli.server_child import running_server
from rollout_service.settings import load_own_settings

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
    assert (settings.tls_certificate, settings.store.url, settings.store.prefix) == (None, None, "rollouts")
    assert (settings.cluster.name, settings.gateway.port) == (None, 0)
    assert settings.gateway.obey_sampling
    assert (settings.pipeline.init_workers, settings.pipeline.rollout_workers) == (3, 7)


@pytest.mark.slow
async def test_a_command_uses_its_own_server_in_the_folder_of_a_service(folder):
    flags = ["--sandbox", "local", "--model", "calc-tuned"]
    async with running_server(folder / "state", flags) as client:
        assert "calc" in {one.name for one in await client.environments()}
        assert [one.node for one in await client.nodes()] != ["gpu-1"]

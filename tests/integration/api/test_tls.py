"""The API over TLS serves the configured certificate, and the API withstands every attack."""

import json
import math
import ssl
import time
from collections.abc import Iterator

import anyio
import pytest
from typer.testing import CliRunner

from rollout_client.client import CaFileError, RolloutClient, UnreachableError
from rollout_client.sync import SyncRolloutClient
from rollout_service.base.errors import ConfigurationError
from rollout_service.cli import app as cli
from rollout_service.http.server import Certificate, expiry
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.server.api.serve import load_certificate
from rollout_service.settings import load_settings
from tests.support.api.attacks import CHECKS, Target, attack
from tests.support.api.server import api_server, make_certificate
from tests.support.waiting import until

KEY = "a-key-of-enough-characters"


def test_a_client_reaches_a_server_whose_certificate_it_trusts(tmp_path, monkeypatch):
    certificate, key = make_certificate(tmp_path)
    flags = ["--tls-certificate", str(certificate), "--tls-key", str(key)]
    with api_server(tmp_path, *flags, ROLLOUT_KEYS=KEY) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with SyncRolloutClient(server.url, KEY, ca_file=certificate) as client:
            assert client.runs() == []
        with (
            pytest.raises(UnreachableError, match="certificate verify failed"),
            SyncRolloutClient(server.url, KEY, patience_seconds=0) as stranger,
        ):
            stranger.runs()
        monkeypatch.setenv("ROLLOUT_CA_FILE", str(certificate))
        listed = CliRunner().invoke(cli, ["runs", "list", "--json", "--url", server.url, "--key", KEY])
        assert (listed.exit_code, listed.stdout.strip()) == (0, "[]")


def test_unusable_certificates_are_reported_before_the_start(tmp_path):
    certificate, key = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, other_key = make_certificate(tmp_path / "other")
    for wrong, says in (
        ({"tls_certificate": certificate, "tls_key": other_key}, "KEY_VALUES_MISMATCH"),
        ({"tls_certificate": tmp_path / "none.pem", "tls_key": key}, "No such file"),
        ({"tls_certificate": key}, "for TLS"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            load_certificate(load_settings(**wrong), Metrics())
    with pytest.raises(ConfigurationError, match="tls_certificate is not"):
        load_settings(tls_key=key)


@pytest.mark.parametrize("days", [30, 20_000])  # times of two forms
def test_the_time_is_known_when_a_certificate_expires(tmp_path, days):
    certificate, key = make_certificate(tmp_path, days=days)
    metrics = Metrics()
    assert "rollout_certificate_expires_timestamp_seconds +Inf" in metrics.render().decode()
    assert load_certificate(load_settings(tls_certificate=certificate, tls_key=key), metrics) is not None
    shown = metrics.registry.get_sample_value("rollout_certificate_expires_timestamp_seconds")
    until = ssl.cert_time_to_seconds(ssl._ssl._test_decode_cert(certificate)["notAfter"])
    assert shown == until == pytest.approx(time.time() + 86_400 * days, abs=600)
    assert math.isnan(expiry(b"-----BEGIN CERTIFICATE-----\nMIIBhTCC\n-----END CERTIFICATE-----\n"))


async def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_service.http.server.POLL_SECONDS", 0.01)
    certificate, key = make_certificate(tmp_path)
    readings: list[bool] = []
    followed = Certificate(certificate, key, None, reloaded=readings.append)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(followed.follow, context)
        old = certificate.read_text()
        assert served_by(context) == ssl.PEM_cert_to_DER_cert(old)
        certificate.write_text("broken")
        await until(lambda: readings == [False])
        certificate.write_text(old)
        assert served_by(context) == ssl.PEM_cert_to_DER_cert(old)
        make_certificate(tmp_path)
        await until(lambda: served_by(context) != ssl.PEM_cert_to_DER_cert(old), 20)
        assert readings[-1]
        with monkeypatch.context() as unreadable:
            failed = anyio.Event()

            def fail(_):
                failed.set()
                raise ConfigurationError("Permission denied")

            unreadable.setattr(followed, "_load", fail)
            renewed = ssl.PEM_cert_to_DER_cert(make_certificate(tmp_path)[0].read_text())
            await failed.wait()
        key.chmod(0o640)  # or another owner, with which it can be read
        await until(lambda: served_by(context) == renewed, 20)
        tasks.cancel_scope.cancel()


def served_by(context: ssl.SSLContext) -> bytes | None:
    """Return the certificate that a client receives in an in-memory handshake."""
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trust.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client.getpeercert(binary_form=True)


async def test_a_client_names_a_file_that_it_cannot_read():
    with pytest.raises(CaFileError, match=r"'/nowhere.pem' cannot be used: No such file"):
        RolloutClient("https://localhost", ca_file="/nowhere.pem")


KEYS = {role: f"{role}-key-of-enough-characters" for role in ("admin", "read", "submit")}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    keys = json.dumps([{"name": role, "role": role, "key": key} for role, key in KEYS.items()])
    folder = tmp_path_factory.mktemp("server")
    with api_server(folder, before=["prlimit", "--nofile=900:900"], ROLLOUT_KEYS=keys) as server:
        yield Target(server.url, **KEYS)
        assert server.process.poll() is None, server.log
        assert not [role for role, key in KEYS.items() if key in server.log]
        assert "Traceback" not in server.log


def test_there_are_enough():
    assert len(CHECKS) >= 20


@pytest.mark.parametrize("name", CHECKS)
async def test_it_holds(target, name):
    async for outcome in attack(target, [name]):
        assert outcome.held, outcome.why

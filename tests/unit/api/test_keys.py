"""Each key's role limits its requests, and keys can change while the service runs."""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest
import structlog
from fastapi import FastAPI
from fastapi.routing import APIRoute

from rollout_service.base.errors import ConfigurationError
from rollout_service.http.keyring import ApiKey, Keyring, Role, file_version, needed_role
from rollout_service.server.api.app import MODULES, create_app
from rollout_service.settings import load_settings
from tests.support.waiting import until

VALUE = "{role}-key-of-enough-characters"
SUBMIT = {
    ("POST", "/v1/rollouts"),
    ("DELETE", "/v1/rollouts/{rollout_id}"),
    ("POST", "/v1/rollouts/{rollout_id}/end"),
    ("POST", "/v1/runs"),
    ("PATCH", "/v1/runs/{run_id}"),
    ("DELETE", "/v1/runs/{run_id}"),
    ("POST", "/v1/runs/{run_id}/tasks"),
    ("POST", "/v1/runs/{run_id}/lease"),
    ("POST", "/v1/runs/{run_id}/rescore"),
    ("POST", "/v1/rescore"),
    ("POST", "/v1/runs/{run_id}/batches/{batch_id}/ack"),
    ("POST", "/v1/runs/{run_id}/batches/{batch_id}/renew"),
    ("POST", "/v1/runs/{run_id}/batches/{batch_id}/nack"),
    ("POST", "/v1/sessions"),
    ("DELETE", "/v1/sessions"),
    ("POST", "/v1/sessions/{session_id:path}/end"),
    ("POST", "/v1/sessions/{session_id:path}/feedback"),
    ("DELETE", "/v1/sessions/{session_id:path}"),
    ("POST", "/process"),
    ("POST", "/cancel"),
}
"""All requests of a trainer that does not control engines. Any other that is not a GET needs `admin`."""
PROBES = {"/health", "/ready"}


def routes() -> list[tuple[str, str]]:
    found = [route for module in MODULES for route in module.router.routes if isinstance(route, APIRoute)]
    return sorted((method, route.path) for route in found for method in route.methods)


def key(role: Role) -> ApiKey:
    return ApiKey.model_validate({"name": f"the {role} key", "role": role, "key": VALUE.format(role=role)})


@pytest.fixture
def app() -> FastAPI:
    return create_app(load_settings(keys=[key(role).model_dump() for role in Role]))


def test_every_route_has_the_role_that_the_table_gives():
    assert set(routes()) >= SUBMIT
    for method, path in routes():
        needed = Role.READ if method == "GET" else Role.SUBMIT if (method, path) in SUBMIT else Role.ADMIN
        assert needed_role(method, path) is needed, (method, path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/rolloutsx"),
        ("POST", "/v1/weights"),
        ("POST", "//v1/rollouts"),
        ("POST", "/v1/Rollouts"),
        ("POST", "/processes"),
        ("OPTIONS", "/v1/rollouts-x"),
        ("BREW", "/v1/backends"),
        ("POST", "/new"),
    ],
)
def test_routes_without_a_named_role_need_admin(method, path):
    assert needed_role(method, path) is Role.ADMIN


async def test_no_role_sends_more_than_it_may_on_any_route(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        for method, path in routes():
            for role in Role:
                concrete = re.sub(r"{\w+}", "x", path)
                headers = {"authorization": f"Bearer {VALUE.format(role=role)}"}
                if path in PROBES or role.allows(needed_role(method, path)):
                    continue
                answer = await http.request(method, concrete, headers=headers)
                assert answer.status_code == 403, (method, path, role)
                problem = answer.json()
                assert problem["context"] == {"role": role, "needed": needed_role(method, path)}
                assert "-of-enough-" not in answer.text
            if path not in PROBES:
                assert (await http.request(method, concrete)).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-rollout-key": VALUE.format(role="read")}, 403),
        ({"x-rollout-key": VALUE.format(role="read"), "authorization": "token of-the-portal"}, 403),
        (
            {
                "x-rollout-key": VALUE.format(role="read"),
                "authorization": f"Bearer {VALUE.format(role='admin')}",
            },
            403,
        ),
        ({"x-rollout-key": "another-key-of-enough-characters"}, 401),
        ({"x-rollout-key": "", "authorization": f"Bearer {VALUE.format(role='admin')}"}, 401),
        ({"x-rollout-key": f"Bearer {VALUE.format(role='admin')}"}, 401),
        ({"cookie": f"x-rollout-key={VALUE.format(role='admin')}"}, 401),
    ],
)
async def test_a_header_of_its_own_has_the_key_where_a_portal_uses_the_other(app, headers, status):
    """A key of `read` that is known is a 403 for an order, and one that is not is a 401."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        answer = await http.post("/v1/pause", json={}, headers=headers)
        assert answer.status_code == status
        assert "-of-enough-" not in answer.text


FILE = """
[[keys]]
name = "{name}"
role = "read"
key = "{name}-key-of-enough-characters"
"""


def write(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.chmod(0o600)
    draft.replace(path)


@pytest.mark.slow
async def test_a_changed_file_is_in_force_without_a_restart_and_a_wrong_one_changes_nothing(tmp_path):
    path = tmp_path / "keys.toml"
    write(path, FILE.format(name="old"))
    readings: list[bool] = []
    ring = Keyring([key(Role.ADMIN)], path, reloaded=readings.append)
    with structlog.testing.capture_logs() as logs:
        async with ring.watching():
            bad_files = ("[[keys]", "keys = []", FILE.format(name="x").replace("read", "root"), "x = 1")
            for count, bad in enumerate(bad_files, start=1):
                write(path, bad)
                os.kill(os.getpid(), signal.SIGHUP)
                await until(lambda least=count: len(readings) >= least)
                assert ring.find("old-key-of-enough-characters")
            assert not any(readings)
            write(path, FILE.format(name="new"))
            await until(lambda: ring.find("new-key-of-enough-characters") is not None)  # without a signal
        assert ring.find("old-key-of-enough-characters") is None
        assert ring.find(VALUE.format(role="admin"))
    assert "-of-enough-" not in str(logs)
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"]


def test_a_file_that_may_be_read_at_last_is_read_again(tmp_path):
    path = tmp_path / "key.pem"
    path.write_text("key")
    before = file_version(path)
    assert file_version(path) == before
    path.chmod(0o640)
    assert file_version(path) != before
    path.unlink()
    assert file_version(path) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("keys = ", "not valid TOML"),
        ("", "keys: Field required"),
        ('[keys]\na = "a-key-of-enough-characters"', "keys: Input should be a valid list"),
        (FILE.format(name="a") * 2, "the same name"),
        (FILE.format(name="a").replace("-of-enough-characters", ""), "needs 16"),
    ],
)
def test_a_file_that_is_wrong_at_the_start_is_refused(tmp_path, text, says):
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(says)) as refused:
        create_app(load_settings(host="0.0.0.0", keys_file=path))
    assert "a-key" not in str(refused.value)
    assert "[[keys]]" in refused.value.hint or "valid list" not in says


def test_a_file_that_others_may_read_is_reported(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(FILE.format(name="old"))
    path.chmod(0o644)
    with structlog.testing.capture_logs() as logs:
        keyring = Keyring([], path)
        keyring.reload()
    said = "other users can read the keys file"
    assert [entry["event"] for entry in logs] == [said, "keys reloaded", said]

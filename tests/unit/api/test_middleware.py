"""Only the probes and the description of the API answer without a bearer key."""

import logging

import httpx
import pytest
from structlog.testing import capture_logs

from rollout_service.server.api.app import create_app
from rollout_service.settings import load_settings

FIRST, SECOND = "first-key-of-enough-characters", "second-key-of-enough-characters"


@pytest.fixture
def http() -> httpx.AsyncClient:
    app = create_app(load_settings(keys=[FIRST, SECOND]))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service")


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer wrong", f"Basic {FIRST}", FIRST, f"Bearer {FIRST} x", "Bearer \xe9"]
)
async def test_without_a_right_key(http, value):
    async with http:
        headers = {"authorization": value.encode("latin-1")} if value is not None else {}
        response = await http.get("/nowhere", headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["code"] == "unauthorized"
        assert FIRST not in response.text


@pytest.mark.parametrize("value", [f"Bearer {FIRST}", f"bearer {SECOND}"])
async def test_with_a_right_key(http, value):
    async with http:
        response = await http.get("/nowhere", headers={"authorization": value})
        assert response.status_code == 404


async def test_the_probe_needs_none(http):
    async with http:
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("path", ["/s/{key}/v1/messages", "/v1/s/{key}/chat/completions", "/s/{key}"])
async def test_no_line_of_the_log_has_a_key_that_a_client_put_into_the_path(http, path, caplog):
    with caplog.at_level(logging.DEBUG), capture_logs() as lines:
        async with http:
            await http.post(path.format(key="rk-secret"), json={})
    assert [line["path"] for line in lines if line["event"] == "request"] == [path.format(key="***")]
    assert "rk-secret" not in f"{lines}"

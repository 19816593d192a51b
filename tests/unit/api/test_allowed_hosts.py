"""A server answers only for its allowed hosts, and refuses requests from pages of other sites."""

import socket

import httpx
import pytest

from rollout_service.http.allowed_hosts import AllowedHosts
from rollout_service.server.api.app import create_app
from rollout_service.settings import load_settings

KEY = "a-key-of-enough-characters-for-anyone"
ORDERS = ["/stop", "/start", "/clear_llm_server", "/v1/abort", "/v1/pause", "/v1/resume"]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8080",
        "127.0.0.1:9",
        "[::1]:8080",
        "LOCALHOST.",
        "a.localhost:1",
        "10.0.0.7:80",
        None,
    ],
)
def test_names_of_this_machine_and_addresses(host):
    assert AllowedHosts([], bound="127.0.0.1", keyed=False).allows_host(host)
    assert AllowedHosts(["other.example"], bound="127.0.0.1", keyed=True).allows_host(host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1@evil.example",
     "localhost:x", "[::1", "", "evil.example#localhost", "127.1.evil", "0x7f.1"],
)  # fmt: skip
def test_a_name_that_a_web_site_can_have_is_refused(host):
    assert not AllowedHosts([], bound="127.0.0.1", keyed=False).allows_host(host)


def test_listed_names_and_those_below_them():
    hosts = AllowedHosts(["rollouts.example", "*.lab.example"], bound="0.0.0.0", keyed=True)
    assert hosts.allows_host("Rollouts.Example:443")
    assert hosts.allows_host("a.b.lab.example")
    assert not hosts.allows_host("lab.example")
    assert not hosts.allows_host("evil-lab.example")
    assert hosts.allows_host(socket.gethostname())


def test_a_server_with_keys_answers_to_any_name_unless_some_are_listed():
    assert AllowedHosts([], bound="0.0.0.0", keyed=True).allows_host("node-7.cluster:8080")
    assert not AllowedHosts(["x.example"], bound="0.0.0.0", keyed=True).allows_host("node-7.cluster:8080")


@pytest.mark.parametrize(
    ("origin", "site", "taken"),
    [
        (None, None, True),
        (None, "none", True),
        (None, "cross-site", False),
        (None, "same-site", False),
        ("http://localhost:8080", None, True),
        ("https://localhost:8080", "same-origin", True),
        ("http://localhost:8080", "cross-site", False),
        ("http://localhost:3000", "same-site", False),
        ("http://evil.example", "cross-site", False),
        ("null", None, False),
        ("http://[", None, False),
        ("https://page.example", "cross-site", True),
        ("https://page.example.evil.example", "cross-site", False),
    ],
)
def test_orders_of_web_pages(origin, site, taken):
    hosts = AllowedHosts(["page.example"], bound="127.0.0.1", keyed=False)
    assert hosts.allows_origin(host="localhost:8080", origin=origin, site=site) is taken


@pytest.fixture(params=[True, False], ids=["keys", "no keys"])
def http(request: pytest.FixtureRequest) -> httpx.AsyncClient:
    app = create_app(load_settings(keys=[KEY] if request.param else []))
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", headers=headers)


@pytest.mark.parametrize("path", ORDERS)
async def test_no_order_without_a_body_is_taken_from_another_site(http, path):
    async with http:
        for headers in (
            {"origin": "http://evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"origin": "null"},
        ):
            refused = await http.post(path, headers=headers)
            assert refused.status_code == 403, headers
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.json()["code"] == "forbidden"


async def test_a_name_that_points_here_is_misdirected_without_keys():
    app = create_app(load_settings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://evil.example") as http:
        for path in ("/health", "/docs", "/v1/rollouts", "/nowhere"):
            refused = await http.get(path)
            assert refused.status_code == 421
            assert "allowed_hosts" in refused.json()["detail"]


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "a/json"],
)
async def test_a_body_that_a_form_can_send_is_a_415(http, kind):
    headers = {} if kind is None else {"content-type": kind}
    async with http:
        for path in [*ORDERS, "/v1/rollouts", "/process"]:
            refused = await http.post(path, content=b"{}", headers=headers)
            assert refused.status_code == 415
            assert "application/json" in refused.json()["detail"]


def test_names_are_a_list_or_one_value_with_commas(monkeypatch):
    for value in ("a.example, b.example", '["a.example", "b.example"]'):
        monkeypatch.setenv("ROLLOUT_ALLOWED_HOSTS", value)
        assert load_settings().allowed_hosts == ["a.example", "b.example"]

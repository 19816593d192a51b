"""The service answers below its prefix and to the host names that it allows, and to no others."""

import socket
from functools import cache

import httpx
import pytest
from fastapi import FastAPI

from api_schemas.external import RolloutEnd
from rollout_service.base.errors import ConfigurationError
from rollout_service.http import problems
from rollout_service.http.allowed_hosts import AllowedHosts
from rollout_service.server.api.app import create_app
from rollout_service.settings import load_settings

KEY, READER = "a-key-of-enough-characters", "b-key-of-enough-characters"
PREFIX = "/node/host-1/8080"
PATHS = [
    "/v1/rollouts",
    "/v1/overview",
    "/v1/overview/stream",
    "/v1/events",
    "/v1/rollouts/a/tokens",
    "/v1/sessions",
    "/metrics",
    "/status",
]
SPELLINGS = [
    "",
    PREFIX,
    f"{PREFIX}/",
    f"{PREFIX}//",
    f"/{PREFIX}",
    f"{PREFIX}{PREFIX}",
    f"{PREFIX}/docs/..",
    f"{PREFIX}/dashboard/../..",
    f"{PREFIX}/dashboard",
    f"{PREFIX}/health",
    f"{PREFIX}/docs",
    PREFIX.replace("/8080", "%2F8080"),
    PREFIX.replace("node", "n%6Fde"),
    PREFIX.upper(),
    "/node/host-1",
    f"{PREFIX}0",
    f"{PREFIX}/.",
    f"{PREFIX};x",
    f"{PREFIX}%00",
]


@cache
def app(prefix: str) -> FastAPI:
    keys = [KEY, {"name": "reader", "role": "read", "key": READER}]
    return create_app(load_settings(keys=keys, path_prefix=prefix))


def client(prefix: str = PREFIX) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app(prefix)), base_url="http://service")


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_no_spelling_of_the_prefix_opens_anything(spelling):
    async with client() as http:
        for path in PATHS:
            answer = await http.get(spelling + path)
            # Files of the open pages are all that answers otherwise, and there is none of such a name.
            assert answer.status_code in (401, 404), (spelling, path)
            assert answer.status_code == 401 or "/docs/" in spelling + path or "/dashboard" in spelling, (
                spelling,
                path,
            )
            assert answer.json()["code"] in ("unauthorized", "not_found")


@pytest.mark.parametrize("spelling", ["", PREFIX])
async def test_roles_are_those_of_the_path_without_the_prefix(spelling):
    async with client() as http:
        headers = {"authorization": f"Bearer {READER}"}
        for path in ("/v1/pause", "/v1/rollouts", "/stop"):
            answer = await http.post(f"{spelling}{path}", headers=headers)
            assert answer.status_code == 403, path


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["", PREFIX])
async def test_pages_and_probes_answer_with_and_without_the_prefix(spelling):
    async with client() as http:
        assert (await http.get(f"{spelling}/health")).json()["status"] == "ok"
        for page in ("/", "/docs"):
            answer = await http.get(spelling + page)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/html")
        document = (await http.get(f"{spelling}/openapi.json")).json()
        assert document["servers"] == [{"url": PREFIX}]


async def test_the_prefix_alone_leads_to_the_page_below_it():
    async with client() as http:
        answer = await http.get(PREFIX)
        assert (answer.status_code, answer.headers["location"]) == (307, f"{PREFIX}/")


@pytest.mark.parametrize("header", [{"authorization": f"Bearer {KEY}"}, {"x-rollout-key": KEY}])
async def test_either_header_may_carry_the_key(header):
    async with client() as http:
        answer = await http.get(f"{PREFIX}/nowhere", headers=header)
        assert answer.status_code == 404
        assert answer.json()["detail"].startswith("there is no route /nowhere")


async def test_a_redirection_stays_below_the_prefix():
    async with client() as http:
        answer = await http.get(f"{PREFIX}/v1/rollouts/", headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 307
        assert answer.headers["location"] == f"{PREFIX}/v1/rollouts"


@pytest.mark.slow
async def test_without_the_setting_a_prefix_is_a_path_like_any_other():
    async with client("") as http:
        assert (await http.get(f"{PREFIX}/health")).status_code == 401
        assert "servers" not in (await http.get("/openapi.json")).json()


@pytest.mark.parametrize("prefix", ["node", "/node/", "/", "/a//b", "/a b", "/%2e", "/a?b", "//a"])
def test_a_prefix_that_is_no_path_is_refused(prefix, tmp_path):
    with pytest.raises(ConfigurationError, match="path_prefix"):
        load_settings(path_prefix=prefix)


A_KEY = "a-key-of-enough-characters-for-anyone"
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
    app = create_app(load_settings(keys=[A_KEY] if request.param else []))
    headers = {"authorization": f"Bearer {A_KEY}"}
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


async def test_a_base_url_with_the_version_is_named(http):
    async with http:
        detail = (await http.get("/v1/v1/rollouts/x")).json()["detail"]
        assert detail == "there is no route /v1/v1/rollouts/x; leave /v1 out of the server's URL"


async def test_a_missing_body_is_named():
    app = FastAPI()
    problems.install(app)

    @app.post("/end")
    async def end(end: RolloutEnd) -> None: ...

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        detail = (await http.post("/end")).json()["detail"]
    assert detail == "body: missing; send a JSON object, which may be {} if no field is required"

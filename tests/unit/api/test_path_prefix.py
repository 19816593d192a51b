"""Behind a prefix everything works as without one, and nothing is reachable without a key under any spelling of it."""

from functools import cache

import httpx
import pytest
from fastapi import FastAPI

from rollout_service.base.errors import ConfigurationError
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

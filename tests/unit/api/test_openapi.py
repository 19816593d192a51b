"""The OpenAPI document describes the routes exactly, and its page needs neither a key nor another host."""

import re
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest

from api_schemas.errors import Problem
from rollout_service.base.errors import ConflictError, NotFoundError
from rollout_service.engines.errors import UnknownBackend
from rollout_service.server.api.app import create_app
from rollout_service.server.api.openapi import build
from rollout_service.server.api.routes.support.route import raises
from rollout_service.settings import load_settings

pytestmark = pytest.mark.slow

KEY = "a-key-of-enough-characters-for-anyone"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build(create_app(load_settings(keys=[KEY])), keyed=True)


@pytest.fixture
def http() -> httpx.AsyncClient:
    app = create_app(load_settings(keys=[KEY]))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for operation in item.values():
            yield path, operation


def test_errors_of_one_status_are_documented_together():
    declared = raises(NotFoundError, ConflictError, UnknownBackend)
    assert set(declared) == {404, 409}
    assert "`not_found`: " in declared[404]["description"]
    assert "`unknown_backend`: " in declared[404]["description"]


def test_every_error_is_a_problem(document):
    for path, operation in operations(document):
        for status, answer in operation["responses"].items():
            if int(status) >= 400 and path != "/ready":
                assert set(answer["content"]) == {"application/problem+json"}, (path, status)
                schema = answer["content"]["application/problem+json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/Problem"}
    schemas = document["components"]["schemas"]
    assert "HTTPValidationError" not in schemas
    assert set(schemas["Problem"]["properties"]) == set(Problem.model_fields)


def test_every_filter_of_the_list_is_described(document):
    parameters = document["paths"]["/v1/summaries"]["get"]["parameters"]
    assert len(parameters) > 10
    assert [one["name"] for one in parameters if not one.get("description")] == []


def test_every_route_declares_what_any_can_answer(document):
    for path, operation in operations(document):
        if path in {"/health", "/ready"}:
            assert operation["security"] == []
            continue
        assert {"401", "422", "500", "503"} <= set(operation["responses"]), path
        if "requestBody" in operation:
            assert {"400", "413"} <= set(operation["responses"]), path


def test_references_lead_somewhere(document):
    for reference in re.findall(r"#/components/schemas/(\w+)", repr(document)):
        assert reference in document["components"]["schemas"]


def test_operations_have_names_for_a_generated_client(document):
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in names)


def test_answers_and_bodies_have_names_for_a_generated_client(document):
    """A generator names a class after each; given several media types, it takes the first that it knows."""
    for path, operation in operations(document):
        answers = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
        for said in [operation.get("requestBody", {}), *answers]:
            content = said.get("content", {})
            assert "application/json" in list(content)[:1] or "application/json" not in content, path
            schema = content.get("application/json", {}).get("schema")
            if schema is not None and path != "/v1/environments/{name}/dataset":  # instances have any fields
                assert "$ref" in schema.get("items", schema), path
    assert all(re.fullmatch(r"[A-Z][A-Za-z]+", name) for name in document["components"]["schemas"])


def test_unions_of_schemas_say_by_what_they_differ(document):
    def unions(part: Any) -> Iterator[dict[str, Any]]:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
        for each in inner:
            yield from unions(each)
        members = part.get("oneOf", part.get("anyOf", [])) if isinstance(part, dict) else []
        if sum("$ref" in member for member in members) > 1:
            yield part

    found = list(unions(document["components"]["schemas"]))
    assert found
    for union in found:
        named = union["discriminator"]["mapping"].values()
        assert set(named) == {one["$ref"] for one in union.get("oneOf", [])}


def test_every_body_has_an_example_that_its_schema_takes(document):
    for path, operation in operations(document):
        for body in [operation.get("requestBody", {}), *operation["responses"].values()]:
            content = body.get("content", {}).get("application/json", {})
            if "requestBody" in operation and body is operation["requestBody"]:
                assert "example" in content, path
            if "example" in content:
                whole = {**content["schema"], "components": document["components"]}
                jsonschema_rs.validate(whole, content["example"])


def test_tags_are_described(document):
    used = {tag for _, operation in operations(document) for tag in operation["tags"]}
    assert used == {tag["name"] for tag in document["tags"]}


def test_a_key_is_asked_for_where_there_are_keys(document):
    assert document["security"] == [{"bearer": []}]
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert build(create_app(load_settings()), keyed=False)["security"] == [{}, {"bearer": []}]


async def test_the_page_loads_without_a_key_and_from_this_host_alone(http):
    async with http:
        page = await http.get("/docs")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "//" not in page.text
        for asset in re.findall(r'(?:src|href)="([^"]+)"', page.text):
            loaded = await http.get(f"/{asset}")
            assert loaded.status_code == 200, asset
            assert loaded.headers["x-content-type-options"] == "nosniff"
        started = (await http.get("/docs/start.js")).text
        assert 'url: "openapi.json"' in started
        assert (await http.get("/openapi.json")).json()["paths"]


async def test_without_its_package_the_page_names_the_extra(http, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi_offline", None)
    async with http:
        page = await http.get("/docs")
        assert page.status_code == 404
        assert "pip install 'fastapi-offline>=" in page.text
        assert (await http.get("/openapi.json")).status_code == 200


async def test_other_routes_than_the_page_need_a_key(http):
    async with http:
        for path in ["/metrics", "/docsx", "/openapi.json/", "/v1/runs"]:
            assert (await http.get(path)).status_code == 401, path

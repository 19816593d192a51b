"""A real server answers as its OpenAPI document says, both to generated requests and in ordinary use."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis

from api_schemas.runs import BINARY_MEDIA_TYPE
from tests.support.api.server import api_server
from tests.support.processes.service import Running

pytestmark = pytest.mark.slow(seconds=95)

KEY = "a-key-of-enough-characters-for-anyone"
FEW_EXAMPLES, EXAMPLES = "3", os.environ.get("FUZZ_EXAMPLES", "12")
SEED = os.environ.get("FUZZ_SEED", "1")
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
]
CONFIG = """
[parameters]
"query.wait" = 0
"query.timeout" = 0

# What an engine or a store is to blame for is documented, and never a 500.
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 502, 503, 504]

# A list that is too long may be refused for its bytes before anything counts its items.
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]
"""
WITHOUT_END = ["/v1/events", "/v1/overview/stream", "/process"]
"""Paths that answer only after events that generated requests do not cause, or without an end."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("service")) as server:
        yield server


def serving(folder: Path) -> AbstractContextManager[Running]:
    variables = {
        "ROLLOUT_KEYS": f'["{KEY}"]',
        "ROLLOUT_MAX_BODY_BYTES": "200000",
        "ROLLOUT_SANDBOXES__PRESSURE__ENABLED": "false",
    }
    return api_server(folder, engine="embedded", **variables)


class Documented:
    """A client that validates every response against the OpenAPI document."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())

    def call(
        self, method: str, template: str, status: int, path: dict[str, str] | None = None, **how: Any
    ) -> httpx.Response:
        response = self._http.request(method, template.format_map(path or {}), **how)
        assert response.status_code == status, response.text
        self._schema[template][method].validate_response(response)
        return response


@pytest.fixture(scope="module")
def documented(server: Running) -> Iterator[Documented]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as http:
        yield Documented(http)


def order(documented: Documented, **fields: Any) -> dict[str, Any]:
    dataset = documented.call("GET", "/v1/environments/{name}/dataset", 200, {"name": "calc"}, params={"limit": 1})
    return {"task": {"environment": "calc", "instance": dataset.json()[0]}} | fields


def test_a_rollout_answers_as_documented(documented):
    body, ours = order(documented, rollout_id="one"), {"rollout_id": "one"}
    documented.call("POST", "/v1/rollouts", 200, json=body, params={"wait": 60})
    documented.call("GET", "/v1/rollouts/{rollout_id}", 200, ours, params={"trajectory": True})
    documented.call("GET", "/v1/rollouts/{rollout_id}/trajectory", 200, ours)
    documented.call("GET", "/v1/rollouts", 200)
    documented.call("DELETE", "/v1/rollouts/{rollout_id}", 200, ours)
    documented.call("DELETE", "/v1/rollouts/{rollout_id}", 202, {"rollout_id": "never"})
    documented.call("POST", "/v1/rollouts", 409, json=body | {"metadata": {"other": 1}})
    documented.call("GET", "/v1/rollouts/{rollout_id}", 404, {"rollout_id": "nobody"})
    documented.call("POST", "/v1/rollouts", 422, json=body | {"pol": "x"})
    documented.call("POST", "/v1/rollouts", 503, json=body | {"pool": "nobody", "rollout_id": "two"})


def test_refusals_before_a_route_answer_as_documented(documented):
    as_json = {"content-type": "application/json"}
    documented.call("POST", "/v1/rollouts", 400, content=b"{", headers=as_json)
    documented.call("POST", "/v1/rollouts", 413, content=b"[" + b" " * 300_000 + b"]", headers=as_json)
    documented.call("POST", "/v1/rollouts", 415, content=b"{}", headers={"content-type": "text/plain"})
    documented.call("GET", "/v1/rollouts", 401, headers={"authorization": "Bearer wrong"})
    documented.call("POST", "/v1/abort", 403, json={}, headers={"origin": "https://example.org"})


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("accept", "text/html"),
        ("accept", ";;,q=\xff"),
        ("range", "bytes=0-1"),
        ("if-none-match", "*"),
        ("if-match", '"x"'),
        ("if-modified-since", "never"),
        ("expect", "nothing"),
        ("content-encoding", "gzip"),
        ("accept-encoding", "identity;q=0"),
    ],
)
def test_headers_that_are_ignored_change_nothing(documented, header, value):
    headers = [(header.encode(), value.encode("latin-1"))]
    documented.call("GET", "/v1/rollouts", 200, headers=headers)


@pytest.mark.parametrize("value", ["-1", "x", str(2**64), "1.5"])
def test_a_bad_event_id_is_refused(documented, value):
    documented.call("GET", "/v1/events", 422, headers={"last-event-id": value})


def test_a_run_answers_as_documented(documented):
    task, run = order(documented)["task"], {"run_id": "all"}
    body = {
        "run_id": "all",
        "source": {"kind": "inline", "tasks": [task]},
        "batch_size": 1,
        "group_size": 1,
        "filters": [],
    }
    documented.call("POST", "/v1/runs", 201, json=body)
    documented.call("POST", "/v1/runs", 200, json=body)
    documented.call("POST", "/v1/runs", 409, json=body | {"group_size": 2})
    leased = documented.call("POST", "/v1/runs/{run_id}/lease", 200, run, params={"timeout": 60})
    batch = run | {"batch_id": leased.json()["batch_id"]}
    documented.call("POST", "/v1/runs/{run_id}/lease", 204, run)
    documented.call("POST", "/v1/runs/{run_id}/batches/{batch_id}/renew", 200, batch)
    documented.call("POST", "/v1/runs/{run_id}/batches/{batch_id}/nack", 200, batch)
    arrays = documented.call("POST", "/v1/runs/{run_id}/lease", 200, run, headers={"accept": BINARY_MEDIA_TYPE})
    assert arrays.headers["content-type"] == BINARY_MEDIA_TYPE
    documented.call("POST", "/v1/runs/{run_id}/batches/{batch_id}/ack", 200, batch)
    documented.call("POST", "/v1/runs/{run_id}/lease", 410, run)
    documented.call("GET", "/v1/runs/{run_id}/export", 200, run)
    documented.call("GET", "/v1/runs/{run_id}/export", 200, run, params={"compression": "gzip"})
    documented.call("POST", "/v1/runs/{run_id}/rescore", 200, run, json={})
    documented.call("PATCH", "/v1/runs/{run_id}", 404, {"run_id": "nobody"}, json={})


def test_the_other_routes_answer_as_documented(documented, server):
    for path in ["/v1/backends", "/v1/sandboxes", "/v1/nodes", "/v1/environments", "/v1/runs", "/status"]:
        documented.call("GET", path, 200)
    for path in ["/health", "/ready", "/metrics"]:
        documented.call("GET", path, 200)
    instance = order(documented)["task"]["instance"] | {"data_source": "calc"}
    documented.call("POST", "/process", 200, json={"instance": instance})
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.stream("GET", f"{server.url}/v1/events", params={"after": 0}, headers=headers) as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        assert next(events.iter_lines()).startswith(("event: ", "id: ", "data: ", ":"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("phases", "examples"),
    [
        ("examples,fuzzing,stateful", FEW_EXAMPLES),
        pytest.param(
            "examples,coverage,fuzzing,stateful",
            EXAMPLES,
            marks=pytest.mark.extended("rollout_service/server/api/"),
        ),
    ],
)
def test_generated_requests_find_nothing(tmp_path, phases, examples):
    """Search further with FUZZ_EXAMPLES and FUZZ_SEED; a seed draws the same requests on every machine."""
    with serving(tmp_path) as server:  # a separate server: the requests remove engines and stop the work
        generate(server, tmp_path, phases, examples)


def generate(server: Running, tmp_path: Path, phases: str, examples: str) -> None:
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
    command += [f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"]
    command += ["--phases", phases, "--checks", ",".join(CHECKS)]
    command += ["--max-examples", examples, "--seed", SEED, "--request-timeout", "20", "--no-color"]
    command += ["--suppress-health-check", "too_slow"]  # which is said of the machine as often
    command += [flag for path in WITHOUT_END for flag in ("--exclude-path", path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2_000:]
    log = server.log
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4_000]
    headers = {"authorization": f"Bearer {KEY}"}
    metrics = httpx.get(f"{server.url}/metrics", headers=headers).text
    for method, route in [("POST", "/v1/runs"), ("POST", "/v1/rollouts"), ("GET", "/v1/runs/{run_id}")]:
        served = rf'rollout_http_requests_total{{method="{method}",route="{re.escape(route)}",status="2'
        assert re.search(served, metrics), (method, route)

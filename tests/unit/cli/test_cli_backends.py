"""`rollout-service backends list` says why there is no engine, if one is awaited."""

import json

import pytest
from typer.testing import CliRunner

from rollout_service.cli import app
from tests.support.web_server import Answer, Asked, web_server

WAITS = "No backend is in service. Waiting for policy@gpu-1:30000: connection refused."


def answer_of_a_service_that_waits(asked: Asked) -> Answer:
    if asked.path == "/ready":
        return 503, {}, json.dumps({"ready": False, "reasons": [WAITS]}).encode()
    return 200, {}, b"[]"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_engine_that_is_awaited_is_named_where_none_is_listed(options):
    with web_server(answer_of_a_service_that_waits) as address:
        listed = CliRunner().invoke(app, ["backends", "list", *options, "--url", f"http://{address}"])
    assert listed.exit_code == 0
    assert WAITS in listed.stderr
    assert listed.stdout.startswith("[]" if options else "No engine serves.")

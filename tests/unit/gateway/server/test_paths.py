"""A path tells what is asked for, whatever the client puts before it, and no path takes long to read."""

import time

import pytest

from rollout_service.gateway.contract import Dialect
from rollout_service.gateway.server.paths import Action, GatewayRequest
from tests.support.gateway import answers

HEAD_BYTES = 32_000
"""A little less than a head may have."""
HELLO = {"contents": [{"parts": [{"text": "hi"}]}]}


def request(path: str) -> GatewayRequest:
    return GatewayRequest.of({"method": "POST", "path": path, "query_string": b"", "headers": []})


@pytest.mark.parametrize("versions", ["", "/v1", "/v1beta", "/v1alpha2", "/v12/v1"])
def test_versions_before_a_route_have_no_effect(versions):
    assert request(f"{versions}/responses").action is Action.ANSWER
    assert request(f"{versions}x/responses").action is Action.UNKNOWN


@pytest.mark.parametrize("piece", ["/v1", "/models/", "1"])
@pytest.mark.parametrize("end", ["x", "/models/?:generateContent"])
def test_no_path_takes_long_to_read(piece, end):
    path = "/v1" + piece * (HEAD_BYTES // len(piece)) + end
    began = time.process_time()
    answers.read(Dialect.GOOGLE, HELLO, path=request(path).target)
    assert time.process_time() - began < 0.5, "linear work takes some milliseconds"

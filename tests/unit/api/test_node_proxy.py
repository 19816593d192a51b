"""Requests that another node answers."""

import ssl
import threading

import pytest
from fastapi import Request

from rollout_service.base.errors import UnavailableError
from rollout_service.server.api.node_proxy import _send


async def test_requests_to_other_nodes_read_no_certificates_on_the_event_loop(monkeypatch):
    read_in = []
    create = ssl.create_default_context

    def reading(*args, **kwargs) -> ssl.SSLContext:
        read_in.append(threading.current_thread())
        return create(*args, **kwargs)

    monkeypatch.setattr(ssl, "create_default_context", reading)
    scope = {"type": "http", "method": "GET", "path": "/v1/hangs", "headers": [], "query_string": b""}
    for _ in range(2):
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await _send(Request(scope), "http://127.0.0.1:1", "node b")
    assert threading.main_thread() not in read_in
    assert len(read_in) <= 1

"""Requests that another node answers."""

import ssl
import threading
from types import SimpleNamespace

import pytest
from fastapi import Request

from api_schemas.rollouts import Rollout, RolloutState
from rollout_service.base.errors import UnavailableError
from rollout_service.server.api.node_proxy import _send, wait_for_access
from tests.support import samples

SCOPE = {"type": "http", "method": "GET", "path": "/v1/hangs", "headers": [], "query_string": b""}


async def test_requests_to_other_nodes_read_no_certificates_on_the_event_loop(monkeypatch):
    read_in = []
    create = ssl.create_default_context

    def reading(*args, **kwargs) -> ssl.SSLContext:
        read_in.append(threading.current_thread())
        return create(*args, **kwargs)

    monkeypatch.setattr(ssl, "create_default_context", reading)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await _send(Request(SCOPE), "http://127.0.0.1:1", "node b")
    assert threading.main_thread() not in read_in
    assert len(read_in) <= 1


class AskedError(Exception):
    """The nodes were asked which of them holds a rollout."""


@pytest.mark.parametrize(("state", "is_asked"), [(RolloutState.QUEUED, False), (RolloutState.INIT, True)])
async def test_nodes_are_asked_for_a_rollout_only_once_it_has_begun(state, is_asked):
    async def wait_here(*_: object) -> Rollout:
        return samples.rollout("r", state)

    async def ask() -> None:
        raise AskedError

    own = SimpleNamespace(own=lambda: SimpleNamespace(owner="a"))
    store = SimpleNamespace(cluster=SimpleNamespace(nodes=ask))
    settings = SimpleNamespace(store=SimpleNamespace(url="redis://"))
    service = SimpleNamespace(settings=settings, store=store, nodes=own, wait_for_access=wait_here)
    try:
        assert await wait_for_access(service, Request(SCOPE), "r", 0.01) is None
    except AskedError:
        assert is_asked
    else:
        assert not is_asked

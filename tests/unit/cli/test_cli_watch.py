"""`watch` shows a service that takes no work: its reasons are what one looks for."""

import httpx
import pytest
from typer.testing import CliRunner

from api_schemas.views.overview import Overview
from rollout_client.client import RolloutClient
from rollout_service.cli import app, common
from rollout_service.cli.watch.view import line

EVENT = (
    'id: 7\nevent: node.draining\ndata: {"event_id": 7, "time": "2026-01-01T00:00:00Z", "kind": "node.draining", '
    '"subject": "n1", "data": {}}\n\n'
)


@pytest.fixture
def served(monkeypatch):
    """Serve a drained node, which goes away after an event."""

    def answer(request):
        if request.url.path == "/ready":
            return httpx.Response(503, json={"ready": False, "reasons": ["this node is drained"], "warnings": []})
        if "last-event-id" in request.headers and request.headers["last-event-id"] == "7":
            return httpx.Response(401, json={"title": "Over", "status": 401, "detail": "enough", "code": "over"})
        return httpx.Response(200, text=EVENT, headers={"content-type": "text/event-stream"})

    def connect(url, key, *, patience_seconds=0.0):
        transport = httpx.MockTransport(answer)
        return RolloutClient(url, key, patience_seconds=patience_seconds, transport=transport)

    monkeypatch.setattr(common, "connect", connect)


@pytest.mark.usefixtures("served")
def test_a_service_that_takes_no_work_is_watched():
    shown = CliRunner().invoke(app, ["watch", "--json", "--after", "0"])
    assert '"kind":"node.draining"' in shown.stdout, shown.output
    assert "enough" in shown.stderr


def test_a_line_says_why_a_service_takes_no_work():
    overview = Overview.model_construct(counts={}, nodes=[], backends=[], reasons=["The node is drained."])
    assert line(overview, 0.0) == "0 sandboxes, 0 engines, 0.0 rollouts/s; takes no work: The node is drained."

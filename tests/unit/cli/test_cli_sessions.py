"""`sessions` shows what became of each turn, and says after a deletion which batches a trainer holds."""

import json
from datetime import UTC, datetime

import httpx
import pytest
from typer.testing import CliRunner

from api_schemas.rollouts.sessions import (
    ClosedBecause,
    MarkReason,
    MaskReason,
    NextState,
    TurnKind,
    TurnMark,
    Votes,
)
from api_schemas.sessions import (
    DeletedSessions,
    FeedbackAnswer,
    LeasedPart,
    LiveSession,
    SessionCounts,
    SessionPage,
    SessionState,
)
from rollout_client.client import RolloutClient
from rollout_service.cli import app, common

NOW = datetime(2026, 1, 1, tzinfo=UTC)
COUNTS = SessionCounts(
    served=4,
    recorded=3,
    judged=1,
    delivered=1,
    dropped={MaskReason.OPTED_OUT: 1, MaskReason.SIDE: 1},
    waiting=1,
)
TURNS = [
    TurnMark(turn=0, usable=True, value=1.0, reason=MarkReason.MAJORITY, source="judge", votes=Votes(plus=3)),
    TurnMark(turn=1, kind=TurnKind.SIDE, usable=False, masked_because=MaskReason.SIDE),
    TurnMark(turn=2, usable=False, next_state=NextState(role="tool", chars=12, sha256="0" * 64)),
]
SESSION = LiveSession(
    session_id="s-1",
    state=SessionState.CLOSED,
    closed_because=ClosedBecause.IDLE,
    pool="policy",
    user="0" * 16,
    tenant="acme",
    train=True,
    opened_at=NOW,
    used_at=NOW,
    counts=COUNTS,
)
LEASED = LeasedPart(session_id="s-1", part=0, run_id="run-7", rollout_id="run-7.0", batch_id="run-7.b0")


@pytest.fixture
def server(monkeypatch) -> list[httpx.Request]:
    """Answer the commands' requests, and return them."""
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=answer(request).model_dump_json())

    transport = httpx.MockTransport(handle)
    monkeypatch.setattr(
        common, "connect", lambda url, key, **options: RolloutClient(url, key, transport=transport, **options)
    )
    return seen


def answer(request: httpx.Request):
    if request.method == "DELETE":
        return DeletedSessions(sessions=1, turns=3, undelivered=2, leased=[LEASED])
    if request.url.path.endswith("/feedback"):
        return FeedbackAnswer(turn=2, value=-1.0, revised=True)
    if request.url.path == "/v1/sessions":
        return SessionPage(sessions=[SESSION], next_cursor="more")
    return SESSION.model_copy(update={"turns": TURNS})


def invoke(*arguments: str):
    result = CliRunner().invoke(app, ["sessions", *arguments], env={"COLUMNS": "250"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_list_shows_the_funnel_of_each_session_and_stops_at_its_limit(server):
    shown = invoke("list", "--limit", "2")
    assert shown.exit_code == 0
    header, row, _ = shown.stdout.splitlines()
    assert header.split()[0] == "id"
    assert row.split() == [
        *("s-1", "closed:", "idle", "policy", "acme", "yes", "4", "1", "1", "1"),
        *("1", "opted_out,", "1", "side"),
    ]
    assert len(server) == 2
    assert [one["session_id"] for one in json.loads(invoke("list", "--limit", "1", "--json").stdout)] == ["s-1"]


def test_a_session_is_shown_with_its_turns(server):
    lines = invoke("show", "s-1").stdout.splitlines()
    assert lines[2] == "--- turns"
    assert lines[4].split() == ["0", "main", "1", "judge", "0", "0", "3", "0", "-", "yes"]
    assert lines[5].endswith("no: side")
    assert lines[6].endswith("tool, 12 characters  not decided")
    assert json.loads(invoke("show", "s-1", "--json").stdout)["turns"][0]["votes"]["plus"] == 3


def test_judging_sends_value_and_text_and_says_that_it_is_late(server):
    said = invoke("judge", "s-1", "--value", "-1", "--turn", "2", "--text", "in French")
    assert said.stdout.startswith("turn 2: -1; a run has the turn already")
    assert json.loads(server[0].content) == {"turn": 2, "value": -1.0, "text": "in French"}
    assert invoke("judge", "s-1", "--value", "2").exit_code == 2


@pytest.mark.parametrize(("arguments", "path"), [(("s-1",), "/v1/sessions/s-1"), (("--user", "u"), "/v1/sessions")])
def test_deleting_names_the_batches_that_a_trainer_holds(server, arguments, path):
    said = invoke("delete", *arguments)
    assert said.stdout.splitlines()[0] == "deleted 1 session with 3 turns; 2 parts had not been leased"
    assert said.stdout.splitlines()[-1].split() == ["s-1", "0", "run-7", "run-7.0", "run-7.b0"]
    assert "A trainer may hold" in said.stderr
    assert (server[0].method, server[0].url.path) == ("DELETE", path)
    assert json.loads(invoke("delete", *arguments, "--json").stdout)["leased"][0]["batch_id"] == "run-7.b0"


def test_a_users_tenant_is_passed_on(server):
    assert invoke("delete", "--user", "u", "--tenant", "t").exit_code == 0
    assert dict(server[0].url.params) == {"user": "u", "tenant": "t"}


@pytest.mark.parametrize("arguments", [(), ("s-1", "--user", "u"), ("s-1", "--tenant", "t")])
def test_deleting_nothing_in_particular_is_refused(server, arguments):
    said = invoke("delete", *arguments)
    assert said.exit_code == 1
    assert "either a session's id or --user" in said.stderr
    assert not server

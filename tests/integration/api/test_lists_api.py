"""Lists over HTTP: both clients get the rows that the store has, and each wrong filter is refused by its name."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.runs import RunState
from api_schemas.views.summaries import SummaryFilter
from rollout_client.calls.lists import SummaryFilters
from rollout_client.client import NotFoundError, RolloutClient
from rollout_client.sync import SyncRolloutClient
from rollout_service.cli import app
from rollout_service.store.sqlite import SqliteStore
from tests.support.api.server import filled_server
from tests.support.runs import TASKS, create_run, make_ready

LATER = datetime(2100, 1, 1, tzinfo=UTC)


async def fill(path: Path) -> None:
    """Write a store with an ended run of two groups, and cancelled rollouts of no run."""
    async with await SqliteStore.open(path) as store:
        await create_run(store)
        await make_ready(store, 0, 1)
        await store.runs.update("a", state=RunState.ENDED)  # so that the server starts no more groups
        for number in range(3):
            await store.submit(RolloutRequest(rollout_id=f"alone:{number}", task=TASKS[0]))
            await store.cancel(f"alone:{number}")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with filled_server(tmp_path_factory.mktemp("lists"), fill) as url:
        yield url


async def test_both_clients_list_what_the_filters_select(url):
    async with RolloutClient(url) as client:
        every = [row.rollout_id async for row in client.summaries()]
        assert every == ["alone:2", "alone:1", "alone:0", "a.1.1", "a.1.0", "a.0.1", "a.0.0"]
        cancelled = client.summaries(states=[RolloutState.CANCELLED, RolloutState.FAILED])
        assert [row.rollout_id async for row in cancelled] == every[:3]
        best = client.summaries(run="a", reward_min=0.5, order="oldest", until=LATER)
        assert [row.rollout_id async for row in best] == ["a.0.1", "a.1.1"]
        first = await client.summary_page(limit=5)
        second = await client.summary_page(limit=5, cursor=first.next_cursor)
        assert [row.rollout_id for row in (*first.rows, *second.rows)] == every
        assert (first.matching, second.next_cursor) == (7, None)
    with SyncRolloutClient(url) as blocking:
        rows = list(blocking.summaries(run="a", group=1, environment="calc", text="a."))
        assert [row.rollout_id for row in rows] == ["a.1.1", "a.1.0"]
        assert [row.rollout_id for row in blocking.summary_page(since=LATER).rows] == []


@pytest.mark.parametrize("path", ["/v1/summaries?limit=2", "/v1/runs/a/groups?limit=9", "/v1/runs/a/history?points=7"])
def test_readers_who_allow_an_older_answer_share_it(url, path):
    with httpx.Client(base_url=url, timeout=30) as http:
        exact = http.get(path).raise_for_status()
        shared = [http.get(path, headers={"Cache-Control": "max-age=10"}) for _ in range(2)]
        wrong = http.get(path + "&no=1", headers={"Cache-Control": "max-age=10"})
    assert [answer.json() for answer in shared] == [exact.json()] * 2
    assert {answer.headers["content-type"] for answer in shared} == {"application/json"}
    assert wrong.status_code == 422


def test_the_clients_take_every_filter_of_the_model():
    assert SummaryFilters.__annotations__.keys() == SummaryFilter.model_fields.keys()


def test_a_state_that_is_asked_for_twice_counts_once(url):
    answer = httpx.get(f"{url}/v1/summaries?state=failed&state=cancelled&state=cancelled", timeout=30)
    assert [row["state"] for row in answer.json()["rows"]] == ["cancelled"] * 3


async def test_both_clients_list_the_groups_of_a_run(url):
    async with RolloutClient(url) as client:
        run = client.open_run("a")
        first = await run.group_page(limit=1)
        second = await run.group_page(limit=1, cursor=first.next_cursor)
        assert [group.number for group in (*first.groups, *second.groups)] == [1, 0]
        assert [sample.reward for sample in first.groups[0].samples] == [0.0, 1.0]
        assert [group async for group in run.groups(state="dropped")] == []
        history = await run.history(points=1)
        assert (history.groups, history.reward_mean, history.acceptance) == ([2], [0.5], [1.0])
        with pytest.raises(NotFoundError):
            await client.open_run("b").history()
    with SyncRolloutClient(url) as blocking:
        of_run = blocking.open_run("a")
        assert [group.number for group in of_run.groups(state="ready", order="oldest")] == [0, 1]
        assert of_run.group_page().groups == [*first.groups, *second.groups]
        assert of_run.history(points=1) == history


def test_the_command_line_shows_groups_and_history(url):
    def shown(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["runs", *arguments, "--url", url])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert [line.split() for line in shown("groups", "a", "--limit", "1").splitlines()[1:]] == [
        ["1", "ready", "-", "-", "0.5", "0", "1"]
    ]
    assert shown("groups", "a", "--reason", "zero_variance") == "There are no such groups.\n"
    assert [group["number"] for group in json.loads(shown("groups", "a", "--json"))] == [1, 0]
    (line,) = shown("history", "a", "--points", "1").splitlines()[1:]
    assert line.split()[2:] == ["2", "0.5", "1", "0", "-", "-", "-", "0"]
    assert json.loads(shown("history", "a", "--json"))["groups"] == [1, 1]


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ("summaries?state=done", "query.state.0"),
        ("summaries?group=1", "query.group"),
        ("summaries?run=a&group=-1", "query.group"),
        ("summaries?run=a.b", "query.run"),
        ("summaries?environment=%00", "query.environment"),
        ("summaries?error=x'y", "query.error"),
        ("summaries?reward_min=nan", "query.reward_min"),
        ("summaries?reward_max=much", "query.reward_max"),
        ("summaries?since=0", "query.since"),
        ("summaries?until=2026-01-31", "query.until"),
        ("summaries?text=%25", "query.text"),
        ("summaries?order=best", "query.order"),
        ("summaries?cursor=n", "query.cursor"),
        ("summaries?cursor=o1&order=newest", "query.cursor"),
        ("summaries?limit=0", "query.limit"),
        ("summaries?limit=1001", "query.limit"),
        ("summaries?staet=failed", "query.staet"),
        ("runs/a/groups?state=done", "query.state"),
        ("runs/a/groups?state=ready&reason=stale", "query.reason"),
        ("runs/a/groups?limit=201", "query.limit"),
        ("runs/a/groups?cursor=1", "query.cursor"),
        ("runs/a/history?points=0", "query.points"),
        ("runs/a/history?points=1001", "query.points"),
    ],
)
def test_a_wrong_query_is_named(url, query, path):
    answer = httpx.get(f"{url}/v1/{query}", timeout=30)
    assert answer.status_code == 422, answer.text
    assert [field["path"] for field in answer.json()["errors"]] == [path]

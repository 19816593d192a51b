"""The sub-agents of a rollout over HTTP: both clients, the command line, and each refusal."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from api_schemas.errors import Problem
from api_schemas.rollouts import Rollout
from api_schemas.rollouts.tokens import RolloutMessages
from api_schemas.rollouts.trees import NodeDetail
from rollout_client.client import NotFoundError, RolloutClient
from rollout_client.sync import SyncRolloutClient
from rollout_service.cli import app
from rollout_service.store.sqlite import SqliteStore
from tests.support.api.server import filled_server
from tests.support.store.trees import WORK, bare, order, rollout


async def fill(path: Path) -> None:
    """Write a store with rollouts that asked for nothing, for a summary and for tokens, and one that waits."""
    async with await SqliteStore.open(path) as store:
        for detail in NodeDetail:
            await store.submit(order(detail, f"r-{detail}"))
        for lease in await store.claim("w", limit=3, lease_seconds=100):
            assert await store.finish(lease, "w", rollout(lease.rollout_id))
        await store.submit(order(NodeDetail.SUMMARY, "waiting"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with filled_server(tmp_path_factory.mktemp("nodes"), fill) as url:
        yield url


def read(url: str, path: str, status: int = 200) -> httpx.Response:
    answer = httpx.get(f"{url}/v1/rollouts/{path}", timeout=30)
    assert answer.status_code == status, answer.text
    return answer


@pytest.mark.parametrize("detail", NodeDetail)
async def test_the_clients_read_a_tree_whatever_was_asked_for(url, detail):
    rollout_id = f"r-{detail}"
    nodes = rollout(rollout_id).nodes
    async with RolloutClient(url) as client:
        tree = await client.rollout_nodes(rollout_id)
        assert (tree.rollout_id, tree.nodes, tree.work) == (rollout_id, bare(nodes), WORK)
        second = await client.rollout_node(rollout_id, 2)
        assert second == (nodes[1] if detail is NodeDetail.TOKENS else bare(nodes)[1])


def test_the_messages_of_a_sub_agent_are_read_without_its_tokens(url):
    node = rollout("r-tokens").nodes[0]
    answer = read(url, "r-tokens/messages?node=1")
    talk = RolloutMessages.model_validate_json(answer.text)
    assert (talk.node, talk.messages) == (1, node.trajectory.messages)
    assert "token_ids" not in answer.text


def test_the_blocking_client_does_the_same(url):
    with SyncRolloutClient(url) as client:
        assert client.rollout_nodes("r-tokens").nodes == bare(rollout("r-tokens").nodes)
        assert client.rollout_node("r-tokens", 1) == rollout("r-tokens").nodes[0]


def test_a_rollout_has_what_it_asked_for(url):
    plain = read(url, "r-none", 200).text
    assert '"nodes"' not in plain
    assert '"work"' not in plain
    assert '"nodes"' not in read(url, "r-none?trajectory=true").text
    for detail in (NodeDetail.SUMMARY, NodeDetail.TOKENS):
        nodes = rollout(f"r-{detail}").nodes
        light = Rollout.model_validate_json(read(url, f"r-{detail}").text)
        assert (light.nodes, light.work, light.trajectory) == (bare(nodes), WORK, None)
        whole = Rollout.model_validate_json(read(url, f"r-{detail}?trajectory=true").text)
        assert whole.nodes == (nodes if detail is NodeDetail.TOKENS else bare(nodes))
        assert whole.trajectory == rollout().trajectory
    listed = httpx.get(f"{url}/v1/rollouts", timeout=30).json()["rollouts"]
    assert [sorted({"nodes", "work"} & set(one)) for one in listed] == [[], ["work"], ["work"], []]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nobody/nodes", "there is no rollout nobody"),
        ("nobody/nodes/1", "there is no rollout nobody"),
        ("waiting/nodes", "Wait until the rollout has ended"),
        ("waiting/nodes/1", "Wait until the rollout has ended"),
        ("r-none/nodes/3", "List them with GET /v1/rollouts/r-none/nodes"),
        ("r-none/messages?node=3", "List them with GET /v1/rollouts/r-none/nodes"),
        ("waiting/messages", "tokens are deleted as the settings of retention say"),
    ],
)
def test_what_is_not_there_says_what_to_do(url, path, said):
    problem = Problem.model_validate_json(read(url, path, 404).content)
    assert problem.code == "not_found"
    assert said in problem.detail


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5", str(2**31)])
def test_a_number_that_is_none_is_named(url, number):
    problem = Problem.model_validate_json(read(url, f"r-none/nodes/{number}", 422).content)
    assert [error.path for error in problem.errors] == ["path.number"]


async def test_a_client_learns_that_there_is_no_such_sub_agent(url):
    async with RolloutClient(url) as client:
        with pytest.raises(NotFoundError, match="it has 2"):
            await client.rollout_node("r-none", 9)


def test_the_command_line_shows_the_tree(url):
    def run(*arguments: str, exit_code: int = 0) -> str:
        done = CliRunner().invoke(app, ["show", *arguments, "--url", url])
        assert done.exit_code == exit_code, done.output
        return done.output

    assert "r-none: completed" in run("r-none")
    assert "reader" not in run("r-none")
    text = run("r-none", "--tree")
    assert "steps: 6 critical" in text
    assert text.count("reader") == 2
    assert "page 2 says 4" in text
    tree = json.loads(run("r-none", "--tree", "--json"))
    assert [node["agent"] for node in tree["nodes"]] == ["reader", "reader"]
    assert json.loads(run("r-none", "--json"))["rollout_id"] == "r-none"
    missing = run("nobody", "--tree", exit_code=1)
    assert "there is no rollout nobody" in missing
    assert f"curl -s {url}/v1/rollouts" in missing

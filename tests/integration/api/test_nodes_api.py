"""The nodes of a real service with a store of its own: listed, drained and resumed, and bad commands refused."""

from collections.abc import Iterator

import httpx
import pytest

from api_schemas.errors import Problem
from api_schemas.nodes import NodeState, NodeView
from tests.support.api.server import api_server
from tests.support.processes.service import Running, eventually

ENVIRONMENT = """
name = "tuned"
image = "none"
prompt = "{{ instance.question }}"
[evaluate]
command = "true"
[sandbox]
requires = ["gpu", "fast"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("node")
    tuned = folder / "tuned"
    tuned.mkdir()
    (tuned / "environment.toml").write_text(ENVIRONMENT)
    flags = ["--node-name", "n1", "--node-label", "fast", "--environment", str(tuned)]
    with api_server(folder, *flags) as server:
        yield server


@pytest.fixture
def api(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def nodes(api: httpx.Client) -> list[NodeView]:
    return [NodeView.model_validate(node) for node in api.get("/v1/nodes").json()]


def reasons(api: httpx.Client) -> str:
    return " ".join(api.get("/ready").json()["reasons"])


def test_a_node_says_its_name_labels_address_and_environments(server, api):
    [node] = nodes(api)
    assert (node.node, node.labels, node.state) == ("n1", ["fast"], NodeState.READY)
    assert node.address == server.url
    assert {"calc", "math"} <= set(node.environments)
    assert "tuned" not in node.environments, "it requires a label that the node lacks"
    assert set(node.images) <= set(node.environments)
    assert node.places > 0
    assert api.get("/v1/node").json()["node"] == "n1"


def test_a_drained_node_is_not_ready_until_it_is_resumed(api):
    drained = NodeView.model_validate(api.post("/v1/nodes/n1/drain").json())
    assert drained.state is NodeState.DRAINING
    eventually(lambda: "n1 is draining" in reasons(api))
    assert 'rollout_nodes{state="draining"} 1.0' in api.get("/metrics").text
    resumed = NodeView.model_validate(api.post("/v1/nodes/n1/resume").json())
    assert resumed.state is NodeState.READY
    eventually(lambda: "draining" not in reasons(api))
    assert nodes(api)[0].state is NodeState.READY


def test_the_leader_of_a_store_of_its_own_is_its_only_node(api):
    eventually(lambda: 'rollout_node_leads{role="runs"} 1.0' in api.get("/metrics").text)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/nodes/n9/drain", 404),
        ("POST", "/v1/nodes/n9/resume", 404),
        ("DELETE", "/v1/nodes/n9", 404),
        ("DELETE", "/v1/nodes/n1", 409),
    ],
)
def test_commands_to_unknown_and_live_nodes_are_refused(api, method, path, status):
    refused = api.request(method, path)
    assert refused.status_code == status
    assert path.split("/")[3] in Problem.model_validate_json(refused.content).detail


def test_a_task_that_no_node_can_take_is_refused_with_the_missing_label(api):
    body = {"task": {"environment": "tuned", "instance": {"question": "?"}}}
    refused = Problem.model_validate_json(api.post("/v1/rollouts", json=body).content)
    assert refused.status == 422
    assert [error.path for error in refused.errors] == ["body.task.environment"]
    assert "gpu" in refused.detail
    assert "fast" not in refused.errors[0].message

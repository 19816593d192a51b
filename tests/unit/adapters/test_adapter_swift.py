"""The routes for ms-swift answer with whole samples or with a reason, and its plugin pushes weights by the service."""

from types import SimpleNamespace
from typing import Any

from starlette.testclient import TestClient

from api_schemas.rollouts import RolloutState, StopReason
from rollout_client.adapters import swift
from rollout_client.adapters.submit import parse_task
from tests.support.adapters.modules import modules
from tests.support.adapters.rollouts import TASK, FakeClient, rollout, segment

TWO_TURNS = segment([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 0, 1])
OTHER = segment([1, 9, 5], [0, 0, 1], parent=0)
(ROW,) = swift.rows([TASK])
CONFIG = {"max_tokens": 64, "temperature": 0.5, "top_k": None, "stop": []}


def ask(client: FakeClient, *requests: dict[str, Any], **given: Any) -> Any:
    """Post requests as swift's client does."""
    with TestClient(swift.make_app(client.submitter(**given))) as http:
        body = {"infer_requests": list(requests), "request_config": CONFIG, "metrics": None}
        return http.post("/infer/", json=body)


def test_each_segment_is_a_sample_of_its_request():
    client = FakeClient(rollout(TWO_TURNS, OTHER, stop_reason=StopReason.MAX_TOKENS), rollout(TWO_TURNS, reward=0.0))
    first, second, third = ask(client, ROW | {"uuid": "a"}, ROW | {"uuid": "b"}, concurrency=1).json()
    assert [one["response"]["id"] for one in (first, second, third)] == ["a", "a", "b"]
    assert first["response_token_ids"] == [[1, 2], [3, 4, 5, 6, 7]]
    assert first["response_loss_mask"] == [[0, 0], [1, 1, 0, 0, 1]]
    assert first["rollout_logprobs"] == [[], [-0.3, -0.4, -0.7]]
    assert second["response_token_ids"] == [[1, 9], [5]]
    assert [one["rollout_infos"]["total_reward"] for one in (first, second, third)] == [1.0, 1.0, 0.0]
    assert [one["response"]["choices"][0]["finish_reason"] for one in (first, third)] == ["length", "stop"]
    assert [one["content"] for one in first["messages"]] == ["", "user: 2+2", "", "4"]
    request = client.requests[0]
    assert (request.task, request.limits.max_tokens, request.sampling.temperature) == (TASK, 64, 0.5)


def test_a_task_is_in_the_columns_or_the_message():
    client = FakeClient(rollout(TWO_TURNS))
    columns = {"messages": [{"role": "user", "content": "2+2"}], "data_dict": TASK.model_dump(mode="json")}
    assert ask(client, columns).status_code == 200
    assert client.requests[0].task == TASK
    assert parse_task(ROW["messages"]) == TASK
    refused = ask(FakeClient(), {"messages": columns["messages"]})
    assert (refused.status_code, "task_text" in refused.json()["detail"]) == (422, True)


def test_a_batch_without_a_reward_is_refused_with_the_reason():
    failed = rollout(reward=None, state=RolloutState.FAILED)
    refused = ask(FakeClient(failed, failed), ROW, retries=1)
    assert (refused.status_code, "no memory" in refused.json()["detail"]) == (503, True)


def test_other_routes_say_what_there_is():
    with TestClient(swift.make_app(FakeClient().submitter())) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.post("/get_engine_type/").json()["use_gym_env"] is True
        assert http.post("/reset_prefix_cache/").status_code == 200
        assert http.post("/close_communicator/").status_code == 200
        for refused in (http.get("/get_world_size/"), http.post("/init_communicator/", json={})):
            assert (refused.status_code, "external_plugins" in refused.text) == (501, True)


def test_the_plugin_replaces_the_broadcast(monkeypatch):
    registered: list[Any] = []
    mixin, client = type("RolloutTrainerMixin", (), {}), type("VLLMClient", (), {})
    modules(monkeypatch, "swift.rlhf_trainers.rollout_mixin", RolloutTrainerMixin=mixin)
    modules(monkeypatch, "swift.rlhf_trainers.vllm_client", VLLMClient=client)
    template = {
        "TemplateMeta": lambda name, **given: SimpleNamespace(name=name, **given),
        "register_template": lambda one, exist_ok: registered.append(one),
    }
    modules(monkeypatch, "swift.template", **template)
    swift.install(weights=None, submitter=FakeClient().submitter())
    (made,) = registered
    assert (made.name, made.prefix, made.suffix) == ("rollout_service", [], [])
    client().init_communicator(device="cuda:0")
    waits: list[str] = []
    one = SimpleNamespace(args=SimpleNamespace(async_generate=True), _wait_queue=lambda: waits.append("queue"))
    mixin._move_model_to_vllm(one)
    mixin._move_model_to_vllm(one, skip_async_check=True)
    assert waits == ["queue"]

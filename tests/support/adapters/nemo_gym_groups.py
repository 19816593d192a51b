"""Runs groups through NeMo Gym's own servers and its collection of rollouts, and prints figures as JSON.

    ROLLOUT_URL=... python nemo_gym_groups.py

NeMo Gym starts its servers as processes, as NeMo-RL has it do. No registry has a release of NeMo-RL, so `message_log`
checks what its postprocessing demands: prompts that extend each other, ids, and a log-probability for each of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from aiohttp import ClientResponseError
from nemo_gym.cli.env import RunHelper
from nemo_gym.global_config import GlobalConfigDictParserConfig
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.server_utils import HEAD_SERVER_KEY_NAME, BaseServerConfig, get_response_json
from omegaconf import DictConfig
from real_rollouts import centered, rows, sampled_tokens

from rollout_client import SyncRolloutClient

AGENT = "rollouts"
GROUP_SIZE = 4
FOLDERS = [
    f"responses_api_agents/{AGENT}",
    "environment_servers/legacy_agent",
]  # 0.7 relays through the second
Token = tuple[tuple[int, ...], int, float]


def unused_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def serving(plan: dict[str, list[str]]) -> Iterator[BaseServerConfig]:
    """Run the head server and the agent's; yield where the head server is."""
    here = Path(__file__).parent
    os.environ["ROLLOUT_PLAN"] = json.dumps(plan)
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(here)])
    agent = Path(FOLDERS[0])
    agent.mkdir(parents=True)
    shutil.copy(here / "nemo_gym_agent.py", agent / "app.py")
    (agent / "requirements.txt").touch()
    for folder in FOLDERS:  # they would install NeMo Gym themselves
        installed = Path("environments", folder, ".venv")
        installed.parent.mkdir(parents=True)
        installed.symlink_to(sys.prefix)
    head = {"host": "127.0.0.1", "port": unused_port()}
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    config = {
        "policy_base_url": ["http://127.0.0.1:1/v1"],  # the service samples
        "policy_api_key": "none",
        "policy_model_name": "calc-base",
        "default_host": "127.0.0.1",
        "skip_venv_if_present": True,
        "uv_venv_dir": str(Path("environments").absolute()),
        "ray_head_node_address": ray.get_runtime_context().gcs_address,
        HEAD_SERVER_KEY_NAME: head,
        AGENT: {"responses_api_agents": {AGENT: {"entrypoint": "app.py"}}},
    }
    servers = RunHelper()
    servers.start(
        GlobalConfigDictParserConfig(
            initial_global_config_dict=DictConfig(config), skip_load_from_cli=True, skip_load_from_dotenv=True
        )
    )
    try:
        yield BaseServerConfig(**head)
    finally:
        servers.shutdown()
        ray.shutdown()


def row_of(task: dict[str, Any], index: int, repeat: int = 0, **sampling: float) -> dict[str, Any]:
    """Return a row as NeMo-RL sends it."""
    question = str(task.get("instance", {}).get("question"))
    params = {"input": [{"role": "user", "content": question}], "max_output_tokens": 200} | sampling
    return {
        **task,
        "responses_create_params": params,
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
        "_ng_task_index": index,
        "_ng_rollout_index": repeat,
    }


async def collect(head: BaseServerConfig, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers to rows, or the status and the text of a refusal, as NeMo-RL's loop awaits them."""
    results = []
    for task in RolloutCollectionHelper().run_examples(examples, head_server_config=head):
        try:
            _, result = await task
        except ClientResponseError as error:
            result = {"status": error.status, "said": error.response_content.decode()}
        results.append(result)
    return results


def message_log(result: dict[str, Any]) -> list[Token]:
    """Return each token to train on with all ids before it, after the checks that NeMo-RL makes."""
    seen: list[int] = []
    tokens: list[Token] = []
    for item in result["response"]["output"]:
        if not item.get("generation_token_ids"):
            continue
        prompt, ids, logprobs = (
            item[f"{name}"] for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
        )
        assert prompt[: len(seen)] == seen, "a prompt does not extend the one before it"
        assert len(prompt) > len(seen), "a turn follows another without a prompt"
        assert len(ids) == len(logprobs)
        assert all(isinstance(one, int) for one in prompt + ids)
        assert all(isinstance(one, float) and one <= 0 for one in logprobs)
        tokens += [((*prompt, *ids[:at]), ids[at], logprobs[at]) for at in range(len(ids))]
        seen = prompt + ids
    assert tokens, "nothing to train on"
    return tokens


def first_prompt(result: dict[str, Any]) -> tuple[int, ...]:
    """Return the prompt by which NeMo-RL finds the group of a rollout."""
    items = result["response"]["output"]
    return tuple(next(one["prompt_token_ids"] for one in items if one.get("prompt_token_ids")))


def compare(results: list[dict[str, Any]], client: SyncRolloutClient, joined: str) -> dict[str, Any]:
    """Return how the answers compare with the service's rollouts, of which those of one question are joined."""
    groups: dict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
    rewards: dict[str, float] = {}
    wrong_tokens = wrong_calls = left_out = 0
    for result in results:
        groups[first_prompt(result)].append(result)
        rollout = client.get(result["service_rollout_id"], trajectory=True)
        parts = [sampled_tokens(rollout)]
        if result["left_out"]:
            assert result["instance"]["question"] == joined
            other = client.get(f"{rollout.rollout_id}.other", trajectory=True)
            parts.append(sampled_tokens(other))
        else:
            wrong_calls += calls_of(result) != [
                sum(
                    bool(call.error) is broken for message in rollout.trajectory.messages for call in message.tool_calls
                )
                for broken in (False, True)
            ]
        largest = max(parts, key=len)
        assert result["left_out"] == sum(map(len, parts)) - len(largest)
        left_out += result["left_out"]
        wrong_tokens += message_log(result) != largest
        rewards[rollout.rollout_id] = rollout.reward
    wrong_advantages = 0
    for group in groups.values():  # as NeMo-RL does, whose groups are those of equal prompts
        (question,) = {one["instance"]["question"] for one in group}
        ours = [one["service_rollout_id"] for one in results if one["instance"]["question"] == question]
        own = [rewards[name] for name in ours]
        got = centered([one["reward"] for one in group])
        wrong_advantages += got != centered(own)
    return {
        "groups": sorted(map(len, groups.values())),
        "wrong_tokens": wrong_tokens,
        "wrong_advantages": wrong_advantages,
        "wrong_calls": wrong_calls,
        "left_out": left_out,
    }


def calls_of(result: dict[str, Any]) -> list[int]:
    """Return how many calls an answer has, and how many NeMo-RL takes for calls that were never made."""
    items = result["response"]["output"]
    return [sum(one["type"] == "function_call" for one in items), text_of(result).count("<tool_call>")]


def text_of(result: dict[str, Any]) -> str:
    """Return the text of all messages of an answer."""
    items = result["response"]["output"]
    return "".join(one["content"][0]["text"] for one in items if one["type"] == "message")


async def run(head: BaseServerConfig, tasks: list[dict[str, Any]], client: SyncRolloutClient) -> dict[str, Any]:
    """Return the figures of two groups, an evaluation and the rows that have no answer."""
    training = [
        row_of(task, at, again, temperature=1.0) for at, task in enumerate(tasks[:2]) for again in range(GROUP_SIZE)
    ]
    trained = await collect(head, training)
    failed = await collect(head, [row_of(tasks[2], 2)])
    bad = [
        {"environment": "nowhere", "instance": tasks[0]["instance"]},
        {"instance": tasks[0]["instance"]},
        {"environment": "calc", "instance": {"question": "1 + 1"}},
    ]
    refused = [(await collect(head, [row_of(one, 3)]))[0] for one in bad]
    evaluation = [row_of(task, at, again, temperature=0.0) for at, task in enumerate(tasks[3:]) for again in range(2)]
    evaluated = await collect(head, evaluation)
    server = RolloutCollectionHelper().setup_server_client(head)
    response = await server.post(server_name=AGENT, url_path="/aggregate_metrics", json={"verify_responses": evaluated})
    metrics = await get_response_json(response)
    answers = {(one["_ng_task_index"], text_of(one)) for one in evaluated}
    return {
        **compare(trained, client, str(tasks[0]["instance"]["question"])),
        "failed": failed,
        "refused": [one["status"] for one in refused],
        "evaluation": {
            "mean": metrics["agent_metrics"]["mean/reward"],
            "expected": sum(one["reward"] for one in evaluated) / len(evaluated),
            "answers": len(answers),
        },
    }


def main() -> None:
    """Run everything."""
    tasks = rows(13)
    names = [str(task["instance"]["question"]) for task in tasks]
    plan = {names[0]: ["join"], names[1]: ["fail"], names[2]: ["fail"] * 2}
    with SyncRolloutClient(os.environ["ROLLOUT_URL"]) as client, serving(plan) as head:
        figures = asyncio.run(run(head, tasks, client))
    sys.stdout.write("\n" + json.dumps({"version": version("nemo-gym"), **figures}) + "\n")


if __name__ == "__main__":
    main()

"""Runs groups through verifiers' own server, client and evaluation with its own Python, and prints figures as JSON.

ROLLOUT_URL=... python verifiers_episodes.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import verifiers.v1 as vf
from real_rollouts import PlannedSubmitter, centered, policy, rows, sampled_tokens
from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.serve import EnvClient, EnvServer
from verifiers.v1.utils.format import format_mean
from verifiers.v1.utils.loaders import resolve_env_config

GROUP_SIZE = 4
SAMPLING = vf.SamplingConfig(temperature=1.0, max_tokens=200)


async def serve(tasks: Path, submitter: PlannedSubmitter) -> dict[str, list[Any]]:
    """Return the episodes of each task's group, as prime-rl's orchestrator asks for them."""
    config = resolve_env_config({"taskset": {"id": "rollout-tasks", "rows": str(tasks)}})
    server = EnvServer(config, address="tcp://127.0.0.1:0")
    server.env.submitter = submitter
    running = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    await client.wait_for_server_startup(timeout=30)
    taskset = vf.load_taskset(config.taskset)
    dispatched = [task for task in taskset for _ in range(GROUP_SIZE)]
    episodes = await asyncio.gather(
        *(
            client.run(
                client=vf.EvalClientConfig(api_key_var="NONE", base_url="http://127.0.0.1:1"),
                model="calc-base",
                sampling=SAMPLING,
                task_data=task.data.model_dump(mode="json"),
            )
            for task in dispatched
        )
    )
    await client.close()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    groups = defaultdict(list)
    for task, episode in zip(dispatched, episodes, strict=True):
        groups[task.data.instance["question"]].append(episode)
    return groups


def assign(group: list[Any]) -> list[float]:
    """Write the advantages of clean traces into their nodes, as prime-rl's GRPO does, and return them."""
    clean = [trace for episode in group for trace in episode.traces if trace.ok]
    advantages = centered([trace.reward for trace in clean])
    for trace, advantage in zip(clean, advantages, strict=True):
        for node in trace.nodes:
            if any(node.mask):
                node.advantages = [advantage] * sum(node.mask)
    return advantages


def trained_tokens(branch: Any) -> list[tuple[tuple[int, ...], int, float]]:
    """Return each sampled token of a branch, in the form of `sampled_tokens`."""
    ids, logprobs = branch.token_ids, branch.logprobs
    return [(tuple(ids[:at]), ids[at], logprobs[at]) for at, sampled in enumerate(branch.sampled_mask) if sampled]


def loss_of(branches: list[Any], model: Any) -> tuple[float, torch.Tensor]:
    """Return the largest difference between log-probabilities of engine and torch, and a policy-gradient loss."""
    largest, loss = 0.0, torch.zeros(())
    for branch in branches:
        ids = torch.tensor([branch.token_ids])
        logits = model(ids).logits[0, :-1].float().log_softmax(-1)
        logprobs = logits.gather(-1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(branch.sampled_mask[1:])
        ours, advantages = torch.tensor(branch.logprobs[1:]), torch.tensor(branch.advantages[1:])
        largest = max(largest, float((logprobs - ours)[mask].abs().max().detach()))
        loss = loss - (torch.exp(logprobs - ours) * advantages)[mask].sum()
    return largest, loss


def compare(groups: dict[str, list[Any]], submitter: PlannedSubmitter) -> dict[str, Any]:
    """Return how the episodes compare with the rollouts that the service returned."""
    wrong_tokens = wrong_advantages = 0
    branches: list[Any] = []
    for question, group in groups.items():
        kept = [one for one in submitter.seen[question] if one.reward is not None]
        traces = [trace for episode in group for trace in episode.traces if trace.ok]
        expected = dict(zip((one.rollout_id for one in kept), centered([one.reward for one in kept]), strict=True))
        assign(group)
        for trace in traces:
            for branch in trace.branches:
                got = {value for value, mask in zip(branch.advantages, branch.sampled_mask, strict=True) if mask}
                wrong_advantages += any(abs(one - expected[trace.info["rollout_id"]]) > 1e-6 for one in got)
            branches += trace.branches
        ours = sorted(token for one in kept for token in sampled_tokens(one))
        theirs = sorted(token for trace in traces for branch in trace.branches for token in trained_tokens(branch))
        wrong_tokens += abs(len(ours) - len(theirs)) + sum(
            one != other for one, other in zip(ours, theirs, strict=False)
        )
    model = policy()
    gap, loss = loss_of(branches, model)
    loss.backward()
    rewards = [{trace.reward for one in group for trace in one.traces} for group in groups.values()]
    return {
        "differs": any(len(one) > 1 for one in rewards),
        "samples": len(branches),
        "wrong_tokens": wrong_tokens,
        "wrong_advantages": wrong_advantages,
        "logprob_gap": gap,
        "gradient": float(torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])),
    }


async def evaluate(tasks: Path) -> dict[str, Any]:
    """Return the figures of verifiers' own evaluation of two tasks, of which one cannot run."""
    config = EvalConfig(
        env={"taskset": {"id": "rollout-tasks", "rows": str(tasks)}},
        model="calc-base",
        sampling=SAMPLING,
        rich=None,
        push=False,
        output_dir=Path("outputs"),
    )
    episodes = await run_eval(config)
    traces = [trace for episode in episodes for trace in episode.traces]
    return {
        "ok": [episode.ok for episode in episodes],
        "errors": [error.type for episode in episodes for error in episode.errors],
        "mean": format_mean(traces, lambda trace: trace.reward),
        "expected": [trace.reward for trace in traces],
    }


def written(name: str, tasks: list[dict[str, Any]]) -> Path:
    """Write tasks as JSON Lines."""
    path = Path(name)
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def main() -> None:
    tasks = rows(4)
    names = [str(task["instance"]["question"]) for task in tasks]
    plan = {names[0]: ["join"], names[1]: ["fail"], names[2]: ["fail"] * (GROUP_SIZE + 1)}
    submitter = PlannedSubmitter.from_environment(retries=1).planned(plan)
    groups = asyncio.run(serve(written("tasks.jsonl", tasks), submitter))
    failed = [one for group in groups.values() for one in group if not one.ok]
    bad = {"environment": "nowhere", "instance": {}}
    figures = {
        "ok": [[one.ok for one in group].count(True) for group in groups.values()],
        "failed": [(len(one.traces), [error.type for error in one.errors]) for one in failed],
        "usage": [one.num_output_tokens > 0 for group in groups.values() for one in group if one.ok],
        "turns": sum(one.num_turns for group in groups.values() for one in group if one.ok),
        **compare(groups, submitter),
        "evaluation": asyncio.run(evaluate(written("evaluation.jsonl", [tasks[3], bad]))),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()

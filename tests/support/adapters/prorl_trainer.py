"""A trainer for the ProRL Agent server: it sends what that project's client for verl sends, and makes rows as it does.

Written from the client's behavior. It asks up to three times for a job whose answer is not a 200 or has no messages. A
job that never had any becomes a copy of another, marked as padding, which its actor leaves out of the loss; with
`use_error_mask`, it leaves out jobs with an error as well.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from statistics import mean
from typing import Any

import httpx

ATTEMPTS = 3
SAMPLING = {
    "model": "hosted_vllm/Qwen/Qwen3-4B-Instruct-2507",
    "api_key": "dummy_key",
    "modify_params": False,
    "log_completions": False,
    "native_tool_calling": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "max_iterations": 5,
    "max_output_tokens": 1_536,
    "token_level_generation": True,
    "custom_tokenizer": "Qwen/Qwen3-4B-Instruct-2507",
    "max_model_len": 32_768,
    "ensure_thinking_end_properly": False,
}
EMPTY = {"error": "Empty response", "success": False, "messages": [], "resolved": False, "finish": False}

Results = dict[str, dict[int, dict[str, Any]]]
"""The answer of each trajectory of each instance."""


@dataclass(frozen=True)
class Row:
    """A row of the batch, before padding to a length."""

    instance_id: str
    prompt: list[int]
    response: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    resolved: bool
    error_mask: bool
    is_padded: bool

    def trained(self, *, use_error_mask: bool) -> int:
        """Return how many tokens the actor's loss counts."""
        left_out = self.is_padded or (use_error_mask and self.error_mask)
        return 0 if left_out else sum(self.loss_mask)


class ProrlTrainer:
    """The client, with threads for jobs."""

    def __init__(self, server: httpx.Client, engines: Sequence[str], **sampling: Any) -> None:
        """Forget all engines, and register those at these addresses, as it does when it begins."""
        self.server = server
        self.sampling = SAMPLING | sampling
        self.refused = 0
        self.call("/clear_llm_server")
        for engine in engines:
            self.call("/add_llm_server", address=engine)

    def call(self, path: str, **body: Any) -> dict[str, Any]:
        """Send a command; it reads no answer but one with a 200."""
        if body:
            return self.server.post(path, json=body).raise_for_status().json()
        plain = {"Content-Type": "application/octet-stream"}  # as aiohttp sends a POST without a body
        return self.server.post(path, headers=plain).raise_for_status().json()

    def process(self, instance: dict[str, Any], job_id: str | None = None) -> httpx.Response:
        """Send one instance, as the one client does without and the other with a `job_id`."""
        named = {} if job_id is None else {"job_id": job_id}
        body = {"instance": instance, "sampling_params": self.sampling} | named
        return self.server.post("/process", json=body)

    def batch(self, instances: Sequence[dict[str, Any]], n: int) -> Results:
        """Start the server, send each instance n times, and stop the server."""
        jobs = [each | {"trajectory_id": number} for each in instances for number in range(n)]
        self.call("/start")
        try:
            with ThreadPoolExecutor(len(jobs)) as workers:
                answers = list(workers.map(self._until_answered, jobs))
        finally:
            self.call("/stop")
        results: Results = {}
        for job, answer in zip(jobs, answers, strict=True):
            results.setdefault(job["instance_id"], {})[job["trajectory_id"]] = answer
            assert answer["resolved"] in (True, False), "it counts these two of every answer"
            assert answer["finish"] in (True, False)
        return results

    def _until_answered(self, instance: dict[str, Any]) -> dict[str, Any]:
        for _ in range(ATTEMPTS):
            response = self.process(instance)
            if response.status_code == httpx.codes.OK and response.json().get("messages"):
                return response.json()
            self.refused += 1
        return dict(EMPTY)


def rows_of(results: Results) -> list[Row]:
    """Return the batch of these answers; whatever lacks a field that the client needs raises, as there."""
    anyone = next((one for group in results.values() for one in group.values() if one["messages"]), None)
    rows = []
    for instance_id, group in results.items():
        valid = next((one for one in group.values() if one["messages"]), anyone)
        assert valid is not None, "a batch without any messages ends that trainer"
        for one in group.values():
            padded = not one["messages"]
            copied = {name: valid[name] for name in ("messages", "resolved", "error", "finish")}
            rows.append(_row(instance_id, one | copied if padded else one, padded))
    return rows


def _row(instance_id: str, answer: dict[str, Any], padded: bool) -> Row:
    messages = list(answer["messages"])
    first = next(at for at, message in enumerate(messages) if message["role"] == "assistant")
    assert first, "it takes a conversation that begins with an answer for one without any"
    while messages[-1]["role"] != "assistant":
        del messages[-1]
    ids = [message["token_ids"] for message in messages]
    logprobs = [
        message["logprobs"] if message.get("logprobs") is not None else [0.0] * len(message["token_ids"])
        for message in messages
    ]
    masks = [[int(message["role"] == "assistant")] * len(message["token_ids"]) for message in messages]
    return Row(
        instance_id=instance_id,
        prompt=_joined(ids[:first]),
        response=_joined(ids[first:]),
        loss_mask=_joined(masks[first:]),
        logprobs=_joined(logprobs[first:]),
        resolved=bool(answer.get("resolved", False)),
        error_mask=bool(answer.get("error")),
        is_padded=padded,
    )


def _joined(lists: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def baselines(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean reward of each group, over all of its rows: neither mask takes one out of it."""
    return {
        name: mean(float(row.resolved) for row in rows if row.instance_id == name)
        for name in dict.fromkeys(row.instance_id for row in rows)
    }

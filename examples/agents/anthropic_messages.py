#!/usr/bin/env python3
"""An agent with Anthropic's package, blocking and streaming, whose every token is recorded to train on.

pip install rollout-client anthropic
python examples/agents/anthropic_messages.py --url http://127.0.0.1:8080 --rollouts 8
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from anthropic import Anthropic
from calculator import DESCRIPTION, PARAMETERS, PROMPT, calculate

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Task
from rollout_client.sync import SyncExternalRollout, SyncRolloutClient

TOOL: Any = {"name": "calculate", "description": DESCRIPTION, "input_schema": PARAMETERS}


def work(rollout: SyncExternalRollout) -> str:
    messages: list[Any] = [{"role": "user", "content": f"{rollout.task.instance['question']}\n{PROMPT}"}]
    model = Anthropic(**rollout.anthropic)
    while True:
        with model.messages.stream(model=rollout.model, max_tokens=1_024, messages=messages, tools=[TOOL]) as stream:
            answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in answer.content if block.type == "text")
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": calculate(str(call.input.get("expression", ""))),
            }
            for call in calls
        ]
        messages.append({"role": "user", "content": results})


def main(url: str, rollouts: int) -> None:
    with SyncRolloutClient(url, os.environ.get("ROLLOUT_KEY")) as client:
        for instance in client.dataset("calc", limit=rollouts):
            request = RolloutRequest(task=Task(environment="calc", instance=instance))
            with client.external_rollout(request) as rollout:
                rollout.end(answer=work(rollout))  # without a reward: the environment scores it
            result = rollout.result()
            print(f"{result.rollout_id}: {result.state}, reward {result.reward}, {result.usage.turns} turns")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--rollouts", type=int, default=4)
    arguments = parser.parse_args()
    main(arguments.url, arguments.rollouts)

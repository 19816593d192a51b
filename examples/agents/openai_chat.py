#!/usr/bin/env python3
"""An agent of 40 lines with OpenAI's package, whose every token is recorded to train on.

pip install rollout-client openai
python examples/agents/openai_chat.py --url http://127.0.0.1:8080 --rollouts 8
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import anyio
from calculator import DESCRIPTION, PARAMETERS, PROMPT, calculate
from openai import AsyncOpenAI

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Task
from rollout_client import RolloutClient
from rollout_client.external import ExternalRollout

TOOL: Any = {
    "type": "function",
    "function": {"name": "calculate", "description": DESCRIPTION, "parameters": PARAMETERS},
}


async def work(rollout: ExternalRollout) -> str:
    messages: list[Any] = [{"role": "user", "content": f"{rollout.task.instance['question']}\n{PROMPT}"}]
    async with AsyncOpenAI(**rollout.openai) as model:
        while True:
            answer = await model.chat.completions.create(model=rollout.model, messages=messages, tools=[TOOL])
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                expression = json.loads(call.function.arguments).get("expression", "")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(expression)})


async def main(url: str, rollouts: int) -> None:
    async with RolloutClient(url, os.environ.get("ROLLOUT_KEY")) as client:
        for instance in await client.dataset("calc", limit=rollouts):
            request = RolloutRequest(task=Task(environment="calc", instance=instance))
            async with client.external_rollout(request) as rollout:
                await rollout.end(answer=await work(rollout))  # without a reward: the environment scores it
            result = await rollout.result()
            print(f"{result.rollout_id}: {result.state}, reward {result.reward}, {result.usage.turns} turns")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--rollouts", type=int, default=4)
    arguments = parser.parse_args()
    anyio.run(main, arguments.url, arguments.rollouts)

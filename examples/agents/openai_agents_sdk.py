#!/usr/bin/env python3
"""An agent with OpenAI's Agents SDK, several rollouts at once, whose every token is recorded to train on.

pip install rollout-client openai-agents
python examples/agents/openai_agents_sdk.py --url http://127.0.0.1:8080 --rollouts 8
"""

from __future__ import annotations

import argparse
import os

import anyio
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from calculator import PROMPT, calculate
from openai import AsyncOpenAI

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Task
from rollout_client import RolloutClient

MAX_TURNS = 8


@function_tool(name_override="calculate")
def calculate_tool(expression: str) -> str:
    """Evaluate an arithmetic expression over integers, such as 6 * (7 + 1)."""
    return calculate(expression)


async def attempt(client: RolloutClient, request: RolloutRequest) -> None:
    async with client.external_rollout(request) as rollout:
        async with AsyncOpenAI(**rollout.openai) as openai:
            agent = Agent(
                name="calculator",
                instructions=PROMPT,
                tools=[calculate_tool],
                model=OpenAIChatCompletionsModel(rollout.model, openai),
            )
            run = await Runner.run(agent, str(rollout.task.instance["question"]), max_turns=MAX_TURNS)
        await rollout.end(answer=str(run.final_output))  # without a reward: the environment scores it
    result = await rollout.result()
    print(f"{result.rollout_id}: {result.state}, reward {result.reward}, {result.usage.turns} turns")


async def main(url: str, rollouts: int) -> None:
    set_tracing_disabled(True)
    async with (
        RolloutClient(url, os.environ.get("ROLLOUT_KEY")) as client,
        anyio.create_task_group() as tasks,
    ):
        for instance in await client.dataset("calc", limit=rollouts):
            request = RolloutRequest(task=Task(environment="calc", instance=instance))
            tasks.start_soon(attempt, client, request)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--rollouts", type=int, default=4)
    arguments = parser.parse_args()
    anyio.run(main, arguments.url, arguments.rollouts)

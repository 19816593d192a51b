"""NeMo Gym: an agent server, which is how NeMo-RL gets rollouts. Tested with NeMo Gym 0.4.0 and 0.7.0.

    # app.py of an agent of NeMo Gym
    from rollout_client.adapters.nemo_gym import agent_class
    if __name__ == "__main__":
        agent_class().run_webserver()

A row of the data set has `environment` and `instance` in addition to `responses_create_params`.

Each turn is a message with its `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`; each prompt
begins with the one before it and its generation, as NeMo-RL demands. NeMo-RL takes one row per rollout, and groups rows
by their first prompts: of several segments, the row is the one with the most sampled tokens among those that begin with
the task's prompt; `left_out` counts the tokens of the rest. NeMo Gym requires a number as the reward: a rollout without
one is run again, and then NoRewardError is raised. NeMo-RL takes a `<tool_call>` in a message for an invalid call, so a
malformed call is in the text, in these tags, and any other is an item of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from api_schemas.rollouts import Rollout
from api_schemas.trajectories import Message
from rollout_client.adapters.samples import (
    Sample,
    conversation_of,
    count_left_out,
    only_largest,
    samples_of,
    turns_of,
)
from rollout_client.adapters.submit import RolloutSubmitter, TaskRowError
from rollout_client.errors import InvalidRequestError


async def run(submitter: RolloutSubmitter, body: Mapping[str, Any]) -> dict[str, Any]:
    """Run a rollout for a row, and return the response of an agent's `/run`."""
    params = body.get("responses_create_params") or {}
    request = submitter.request(body, params, max_tokens=params.get("max_output_tokens"), trainer="nemo_gym")
    return dict(body) | verified(await submitter.run_scored(request), params)


def agent_class(submitter: RolloutSubmitter | None = None) -> Any:
    from fastapi import HTTPException
    from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
    from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
    from pydantic import ConfigDict

    class Request(BaseRunRequest):  # type: ignore[misc]
        model_config = ConfigDict(extra="allow")

    class Response(BaseVerifyResponse):  # type: ignore[misc]
        model_config = ConfigDict(extra="allow")

    service = submitter or RolloutSubmitter.from_environment()

    class RolloutAgent(SimpleResponsesAPIAgent):  # type: ignore[misc]
        config: BaseResponsesAPIAgentConfig
        ray_enabled: ClassVar[bool] = False  # else NeMo Gym 0.7 starts Ray for it

        async def responses(self, body: Any = None) -> Any:
            """Refuse: single responses come from the model server."""
            raise NotImplementedError("this agent has whole rollouts only: POST /run")

        async def run(self, body: Request) -> Response:
            """Run a rollout of the row's task; an invalid row is a 422, since trying again does not help."""
            try:
                answer = await run(service, body.model_dump())
            except (TaskRowError, InvalidRequestError) as error:
                raise HTTPException(422, str(error)) from error
            return cast(Response, Response.model_validate(answer))

    # FastAPI resolves annotations by name in this module, which does not have these two classes.
    RolloutAgent.run.__annotations__ = {"body": Request, "return": Response}
    return RolloutAgent


def verified(rollout: Rollout, params: Mapping[str, Any]) -> dict[str, Any]:
    samples = samples_of(rollout)
    rows = only_largest([one for one in samples if one.prompt_ids == samples[0].prompt_ids])
    if not rows or rollout.reward is None:
        raise ValueError(f"rollout {rollout.rollout_id} has nothing to train on")
    return {
        "reward": rollout.reward,
        "response": {
            "id": rollout.rollout_id,
            "object": "response",
            "created_at": time.time(),
            "model": rollout.pool,
            "output": output_items(rows[0], messages_of(rollout)),
            "parallel_tool_calls": True,
            "tool_choice": params.get("tool_choice", "auto"),
            "tools": list(params.get("tools") or []),
        },
        "service_rollout_id": rollout.rollout_id,
        "left_out": count_left_out(samples, rows),
    }


def messages_of(rollout: Rollout) -> list[Message]:
    """Return the message of each turn; none if a compaction has removed turns."""
    messages, own = conversation_of(rollout)
    return [messages[place] for place in own]


def output_items(sample: Sample, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the calls of each turn of a row, and then an assistant's message with the turn's ids."""
    items: list[dict[str, Any]] = []
    for turn in turns_of(sample):
        message = messages[turn.number] if turn.number < len(messages) else Message(role="assistant")
        items += [
            {
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": json.dumps(call.arguments),
            }
            for call in message.tool_calls
            if not call.error
        ]
        items.append(
            {
                "id": f"{sample.rollout_id}-{turn.number}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": text_of(message), "annotations": []}],
                "prompt_token_ids": turn.prompt_ids,
                "generation_token_ids": turn.sampled_ids,
                "generation_log_probs": turn.logprobs,
            }
        )
    return items


def text_of(message: Message) -> str:
    """Return a message's text and its malformed calls, without its reasoning."""
    broken = [f"<tool_call>{call.raw}</tool_call>" for call in message.tool_calls if call.error]
    return "".join([message.content, *broken])

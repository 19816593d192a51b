"""NeMo Gym: an agent server, which is how NeMo-RL gets rollouts. Checked against both sources of 2026-08-22.

    # app.py of an agent of NeMo Gym
    from rollout_client.adapters.nemo_gym import agent_class
    if __name__ == "__main__":
        agent_class().run_webserver()

A row of the data set has `environment` and `instance` in addition to `responses_create_params`.

Guarantees: those of the package. Each turn is an output item with its `prompt_token_ids`, `generation_token_ids` and
`generation_log_probs`; each prompt begins with the one before it and its generation, as NeMo-RL demands. NeMo-RL takes
one row per rollout: if there are several segments, the one with the most sampled tokens; `left_out` counts the tokens
of the rest. NeMo Gym requires a number as the reward: a rollout without one is run again, and then NoRewardError is
raised.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from api_schemas.rollouts import Rollout
from rollout_client.adapters.samples import Sample, count_left_out, largest_sample, samples_of, turns_of
from rollout_client.adapters.submit import RolloutSubmitter, TaskRowError, read_sampling


async def run(submitter: RolloutSubmitter, body: Mapping[str, Any]) -> dict[str, Any]:
    """Run a rollout for a row, and return the response of an agent's `/run`."""
    params = body.get("responses_create_params") or {}
    request = submitter.request(
        body,
        sampling=read_sampling(params),
        max_tokens=params.get("max_output_tokens"),
        metadata={"trainer": "nemo_gym"},
    )
    return dict(body) | verified(await submitter.run_scored(request), params)


def agent_class(submitter: RolloutSubmitter | None = None) -> Any:
    """Return an agent class that is a subclass of NeMo Gym's own."""
    from fastapi import HTTPException
    from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
    from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
    from pydantic import ConfigDict

    class Request(BaseRunRequest):  # type: ignore[misc]
        """A row, with all its fields."""

        model_config = ConfigDict(extra="allow")

    class Response(BaseVerifyResponse):  # type: ignore[misc]
        """The row and its outcome."""

        model_config = ConfigDict(extra="allow")

    service = submitter or RolloutSubmitter.from_environment()

    class RolloutAgent(SimpleResponsesAPIAgent):  # type: ignore[misc]
        """Runs a rollout for each row."""

        config: BaseResponsesAPIAgentConfig

        async def responses(self, body: Any = None) -> Any:
            """Refuse: single responses come from the model server."""
            raise NotImplementedError("this agent has whole rollouts only: POST /run")

        async def run(self, body: Request) -> Response:
            """Run a rollout of the row's task; a row without one is a 422, since trying again does not help."""
            try:
                answer = await run(service, body.model_dump())
            except TaskRowError as error:
                raise HTTPException(422, str(error)) from error
            return cast(Response, Response.model_validate(answer))

    # FastAPI resolves annotations by name in this module, which does not have these two classes.
    RolloutAgent.run.__annotations__ = {"body": Request, "return": Response}
    return RolloutAgent


def verified(rollout: Rollout, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rollout in the form of NeMo Gym's verify response."""
    samples = samples_of(rollout)
    sample = largest_sample(samples)
    if sample is None or rollout.reward is None:
        raise ValueError(f"rollout {rollout.rollout_id} has nothing to train on")
    return {
        "reward": rollout.reward,
        "response": {
            "id": rollout.rollout_id,
            "object": "response",
            "created_at": time.time(),
            "model": rollout.pool,
            "output": output_items(sample, texts_of(rollout)),
            "parallel_tool_calls": True,
            "tool_choice": params.get("tool_choice", "auto"),
            "tools": list(params.get("tools") or []),
        },
        "service_rollout_id": rollout.rollout_id,
        "left_out": count_left_out(samples, [sample]),
    }


def texts_of(rollout: Rollout) -> list[str]:
    """Return the text of each turn and its calls, without its reasoning; none if a compaction has removed turns."""
    if rollout.trajectory is None:
        return []
    said = [message for message in rollout.trajectory.messages if message.role == "assistant"]
    if len(said) != len(rollout.trajectory.finish_reasons):
        return []
    return ["".join([message.content, *(call.raw for call in message.tool_calls)]) for message in said]


def output_items(sample: Sample, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return an assistant's message for each turn of a row, with its ids."""
    return [
        {
            "id": f"{sample.rollout_id}-{turn.number}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [
                {
                    "type": "output_text",
                    "text": texts[turn.number] if turn.number < len(texts) else "",
                    "annotations": [],
                }
            ],
            "prompt_token_ids": turn.prompt_ids,
            "generation_token_ids": turn.sampled_ids,
            "generation_log_probs": turn.logprobs,
        }
        for turn in turns_of(sample)
    ]

"""Rollouts as ATIF 1.8, the trajectory format of Harbor's tools.

Token ids and log-probabilities are those of the engine, or left out where a turn cannot be matched to its message;
nothing is derived from text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from api_schemas.rollouts import Rollout
from api_schemas.trajectories import Message, Segment, ToolCall, Trajectory

SCHEMA_VERSION = "ATIF-v1.8"
SOURCES = {"system": "system", "developer": "system", "user": "user"}
AGENT = "rollout-service"


def to_atif(rollout: Rollout, *, version: str, model: str | None = None) -> dict[str, Any]:
    """Return a rollout as an ATIF document: its messages as steps, with the tokens of each turn.

    Args:
        rollout: a rollout with its trajectory.
        version: the version of this package, as that of the agent.
        model: the name of the model, if it is known.

    Raises:
        ValueError: The rollout has no trajectory, or no message in it.
    """
    trajectory = rollout.trajectory
    if trajectory is None or not trajectory.messages:
        raise ValueError(f"the rollout {rollout.rollout_id} has no conversation to export")
    metrics = list(_metrics(trajectory))
    steps = list(_steps(trajectory.messages, metrics))
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": rollout.rollout_id,
        "trajectory_id": f"{rollout.rollout_id}.{rollout.attempt}",
        "agent": {"name": AGENT, "version": version} | ({"model_name": model} if model else {}),
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": rollout.usage.prompt_tokens,
            "total_completion_tokens": rollout.usage.sampled_tokens,
            "total_steps": len(steps),
        },
        "extra": {
            "task": rollout.task.model_dump(mode="json"),
            "reward": rollout.reward,
            "reward_parts": rollout.reward_parts,
            "stop_reason": rollout.stop_reason,
            "segments": len(trajectory.segments),
        },
    }


def _steps(messages: Sequence[Message], metrics: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the steps; the results of an agent's calls belong to its step."""
    assistants = sum(message.role == "assistant" for message in messages)
    turns = iter(metrics if len(metrics) == assistants else [])
    steps: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "tool" and steps and steps[-1]["source"] == "agent":
            known = {call["tool_call_id"] for call in steps[-1].get("tool_calls", [])}
            result = {"source_call_id": message.tool_call_id} if message.tool_call_id in known else {}
            observation = steps[-1].setdefault("observation", {"results": []})
            observation["results"].append(result | {"content": message.content})
        elif message.role == "assistant":
            steps.append(_agent_step(message, next(turns, None)))
        else:
            steps.append({"source": SOURCES.get(message.role, "user"), "message": message.content})
    for number, step in enumerate(steps, start=1):
        yield {"step_id": number, **step}


def _agent_step(message: Message, metrics: dict[str, Any] | None) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": message.content, "llm_call_count": 1}
    if message.reasoning is not None:
        step["reasoning_content"] = message.reasoning
    if message.tool_calls:
        step["tool_calls"] = [_call(call) for call in message.tool_calls]
    return step | ({"metrics": metrics} if metrics is not None else {})


def _call(call: ToolCall) -> dict[str, Any]:
    """Keep the text of a malformed call as its only argument."""
    arguments = call.arguments if call.arguments is not None else {"raw": call.raw}
    return {"tool_call_id": call.id, "function_name": call.name or "malformed", "arguments": arguments}


def _metrics(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    found = {turn: one for segment in trajectory.segments for turn, one in _turns(segment)}
    for turn in sorted(found):
        yield found[turn]


def _turns(segment: Segment) -> Iterator[tuple[int, dict[str, Any]]]:
    for turn in dict.fromkeys(turn for turn in segment.turn_ids if turn >= 0):
        start = segment.turn_ids.index(turn)
        sampled = [position for position, one in enumerate(segment.turn_ids) if one == turn]
        yield (
            turn,
            {
                "prompt_tokens": start,
                "completion_tokens": len(sampled),
                "prompt_token_ids": segment.token_ids[:start],
                "completion_token_ids": [segment.token_ids[position] for position in sampled],
                "logprobs": [segment.logprobs[position] for position in sampled],
            },
        )

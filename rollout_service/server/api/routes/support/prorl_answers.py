"""The answer to a job of the ProRL Agent server's API, in that server's form.

Its client makes one training row of a job: the `token_ids` of all messages, with the loss on those of assistants and
the reward that `resolved` says. It needs `token_ids` in every message, and asks again, twice, for a job without
messages. A row with an `error` still counts as a zero in the baseline of its group.

So the ids of all messages are one segment of the trajectory, id for id, where those of assistants were sampled; and a
rollout without a reward has no messages, so it never becomes a row with a reward of zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from pydantic import BaseModel, JsonValue

from api_schemas.rollouts import Rollout, Stage, StopReason
from api_schemas.trajectories import FinishReason, Message, Segment, SegmentRole, Trajectory
from rollout_service.tokens import ToolSpec

_ENDS: dict[StopReason | None, str] = {
    StopReason.MAX_TURNS: "RuntimeError: Agent reached maximum iteration in headless mode",
    StopReason.MALFORMED: "AgentToolCallError: too many malformed tool calls in a row",
    StopReason.TRUNCATED: "AgentFormatError: a turn was cut off",
}
"""The errors of agents that stopped early; clients look for these names."""
_PHASES = {Stage.INIT: "init", Stage.ROLLOUT: "run", Stage.EVALUATE: "eval"}


class ProcessTiming(BaseModel):
    """The seconds of each phase, those in queues, and the sum of the phases."""

    init_time: float
    run_time: float
    eval_time: float
    others_time: float
    counted_elapsed: float
    timeout_triggered: bool


class ProcessAnswer(BaseModel):
    """The outcome of an instance."""

    instance_id: JsonValue
    """That of the instance, as is `trajectory_id`; null if it has none."""
    trajectory_id: JsonValue
    messages: list[dict[str, Any]]
    """Each with `token_ids`; those that were sampled also have `input_ids`, their prompt, and `logprobs`. Empty if the
    rollout has no reward."""
    tools: list[dict[str, Any]]
    """The definitions of the agent's tools."""
    resolved: bool
    success: bool
    """Whether the agent ended by itself, as does `finish`."""
    finish: bool
    end_properly: bool
    """Whether the last turn is whole and its calls are well-formed."""
    error: str | None
    """Why the agent stopped early, or why the rollout failed."""
    critical_error: str | None
    """The phase that failed, `init`, `run` or `eval`, or `timeout`; null if there is a reward."""
    filter: bool
    """Whether to leave it out of training."""
    git_patch: None = None
    timing: ProcessTiming
    job_id: str
    reward: float | None
    """Null if the rollout failed; not a field of that server's, as is `report`."""
    report: dict[str, JsonValue]


def process_answer(rollout: Rollout, tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """Return a `ProcessAnswer` as JSON, without validation, which takes long for a long trajectory."""
    failure, stop = rollout.error, rollout.stop_reason
    trajectory = rollout.trajectory if rollout.reward is not None else None
    phase = _PHASES[Stage(failure.stage)] if failure and failure.stage else "run"
    timed_out = failure is not None and failure.code == "stage_timeout"
    finished = failure is None and stop in (StopReason.FINISHED, StopReason.ANSWERED)
    error = None if finished else _ENDS.get(stop, f"AgentError: the agent stopped: {stop}")
    if failure:
        error = f"Error in {phase}: {failure.code}: {failure.message}"
    return {
        "instance_id": rollout.task.instance.get("instance_id"),
        "trajectory_id": rollout.task.instance.get("trajectory_id"),
        "messages": _messages(trajectory) if trajectory else [],
        "tools": list(tools),
        "resolved": rollout.reward is not None and rollout.reward >= 1.0,
        "success": finished,
        "finish": finished,
        "end_properly": trajectory is not None and _ends_properly(trajectory),
        "error": error,
        "critical_error": ("timeout" if timed_out else phase) if failure else None,
        "filter": not finished and stop is not StopReason.MALFORMED,
        "git_patch": None,
        "timing": _timing(rollout, timed_out),
        "job_id": rollout.rollout_id,
        "reward": rollout.reward,
        "report": {
            "state": rollout.state,
            "stop_reason": stop,
            "parts": rollout.reward_parts,
            "error": failure.model_dump(mode="json") if failure else None,
        },
    }


def _timing(rollout: Rollout, timed_out: bool) -> dict[str, Any]:
    seconds = {stage: sum(span.seconds for span in rollout.spans if span.stage is stage) for stage in Stage}
    return {f"{name}_time": seconds[stage] for stage, name in _PHASES.items()} | {
        "others_time": sum(span.queued_seconds for span in rollout.spans),
        "counted_elapsed": sum(seconds.values()),
        "timeout_triggered": timed_out,
    }


def _ends_properly(trajectory: Trajectory) -> bool:
    calls = trajectory.messages[-1].tool_calls if trajectory.messages else []
    return trajectory.finish_reasons[-1:] == [FinishReason.STOP] and all(call.error is None for call in calls)


def _messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the conversation up to its last turn, with the ids of the agent's last segment."""
    segments = [each for each in trajectory.segments if each.role is SegmentRole.MAIN and any(each.loss_mask)]
    if not segments:
        return []
    segment, messages = segments[-1], trajectory.messages
    turns = list(_turns(segment))
    # Messages of turns may be missing, such as those that a program left out; then the first turns have no text.
    missing = len(turns) - sum(message.role == "assistant" for message in messages)
    messages = [Message(role="assistant")] * missing + messages
    said = [at for at, message in enumerate(messages) if message.role == "assistant"]
    answer: list[dict[str, Any]] = []
    told = read = 0
    for (start, end), at in zip(turns, said[-len(turns) :], strict=True):
        sampled = {"input_ids": segment.token_ids[:start], "logprobs": segment.logprobs[start:end]}
        answer += _prompt(messages[told:at], segment.token_ids[read:start])
        answer.append(_message(messages[at], segment.token_ids[start:end]) | sampled)
        told, read = at + 1, end
    return answer


def _turns(segment: Segment) -> Iterator[tuple[int, int]]:
    end = 0
    for turn, ids in groupby(segment.turn_ids):
        start, end = end, end + sum(1 for _ in ids)
        if turn >= 0:
            yield start, end


def _prompt(messages: list[Message], ids: list[int]) -> list[dict[str, Any]]:
    """Put the ids of all messages between two turns on the first, since ids belong to no single message."""
    if ids and (not messages or messages[0].role == "assistant"):
        messages = [Message(role="user"), *messages]  # the client trains on the ids of assistants
    return [_message(message, [] if place else ids) for place, message in enumerate(messages)]


def _message(message: Message, ids: list[int]) -> dict[str, Any]:
    """Add reasoning to the content, and leave out malformed calls."""
    thought = "" if message.reasoning is None else f"<think>\n{message.reasoning}\n</think>\n\n"
    form: dict[str, Any] = {"role": message.role, "content": thought + message.content, "token_ids": ids}
    form |= {"input_ids": None, "logprobs": None}
    calls = [call for call in message.tool_calls if call.error is None]
    if calls:
        form["tool_calls"] = [{"name": each.name, "arguments": json.dumps(each.arguments)} for each in calls]
    return form

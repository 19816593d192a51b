"""How an agent's work went: the stages that it passed, why it stopped, and its usage."""

from __future__ import annotations

from api_schemas.base import Integer, Real, StrEnum, Timestamp, WireModel


class Stage(StrEnum):
    """A stage of the pipeline."""

    INIT = "init"
    ROLLOUT = "rollout"
    EVALUATE = "evaluate"


class StopReason(StrEnum):
    """Why the agent stopped."""

    FINISHED = "finished"
    """The agent called `finish`."""
    ANSWERED = "answered"
    """The agent answered without calling a tool."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    """The next prompt would not fit the model's context."""
    TRUNCATED = "truncated"
    """A turn was cut off by its own token limit and held no complete tool call."""
    MALFORMED = "malformed"
    """Too many malformed tool calls in a row."""
    AGENT_TIMEOUT = "agent_timeout"
    """The agent's own time ran out; its work is scored."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """A sub-agent used up its tool calls."""
    MAX_CRITICAL_STEPS = "max_critical_steps"
    """The agent and its sub-agents used up the steps that may follow each other; its work until then is scored."""
    SANDBOX_ENDED = "sandbox_ended"
    """The agent's sandbox ended, by its own doing or at the end of its lifetime; its work until then is scored."""
    EXITED = "exited"
    """The agent is a program of its own, and ended with an exit code other than 0; its work until then is scored."""
    STAGE_TIMEOUT = "stage_timeout"
    """A stage's deadline passed; the rollout failed."""
    ERROR = "error"
    CANCELLED = "cancelled"


class Span(WireModel):
    """One stage of one attempt. The time in the queue is separate and counts against no limit."""

    stage: Stage
    attempt: Integer
    started_at: Timestamp
    queued_seconds: Real
    """The time that the rollout waited for a worker of this stage."""
    seconds: Real
    """The time that the stage worked on the rollout."""
    sandbox_seconds: Real = 0.0
    """The part of `seconds` spent on starting a sandbox and opening its sessions; some of it overlaps with the setup of
    the task."""
    engine_seconds: Real = 0.0
    """The part of `seconds` spent waiting for the engine."""
    tool_seconds: Real = 0.0
    """The part of `seconds` spent in the agent's tools."""
    replay_seconds: Real = 0.0
    """The part of `seconds` spent on replaying the turns that an interrupted attempt had saved. It counts against no
    limit."""
    turns_replayed: Integer = 0
    """The saved turns that were replayed instead of being sampled again."""
    error: str | None = None
    """The code of the error that ended the stage, if one did."""


class Usage(WireModel):
    """The resources that a rollout used."""

    turns: Integer = 0
    prompt_tokens: Integer = 0
    """Prompt tokens sent to the engine, summed over the turns."""
    cached_tokens: Integer = 0
    """Prompt tokens that the engine served from its prefix cache, by its own count."""
    sampled_tokens: Integer = 0
    tool_calls: Integer = 0
    malformed_calls: Integer = 0

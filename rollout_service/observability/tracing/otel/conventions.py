"""The names and attributes of spans, as in OpenTelemetry's conventions for generative AI.

Every name that leaves the service is here. The conventions are still in development and their Python constants are
deprecated, so a release that renames something changes only this module.
"""

from __future__ import annotations

import hashlib
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.util.types import AttributeValue

from api_schemas.inference import BackendView
from api_schemas.rollouts.steps import StepKind
from rollout_service.engines.contract import GenerateRequest, Generation

# -- of the conventions --------------------------------------------------------

OPERATION: Final = "gen_ai.operation.name"
CHAT, EXECUTE_TOOL, INVOKE_AGENT = "chat", "execute_tool", "invoke_agent"
PROVIDER: Final = "gen_ai.provider.name"
"""The kind of engine: no value is registered for SGLang and vLLM, and others are allowed."""
AGENT_NAME: Final = "gen_ai.agent.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_SEED: Final = "gen_ai.request.seed"
RESPONSE_ID: Final = "gen_ai.response.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
EVALUATION: Final = "gen_ai.evaluation.result"
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
ERROR_TYPE: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"

# -- ours ----------------------------------------------------------------------

ROLLOUT_ID: Final = "rollout.id"
ENVIRONMENT: Final = "rollout.environment"
RUN: Final = "rollout.run"
GROUP: Final = "rollout.group"
ATTEMPT: Final = "rollout.attempt"
STATE: Final = "rollout.state"
REWARD: Final = "rollout.reward"
STOP_REASON: Final = "rollout.stop_reason"
QUEUED_SECONDS: Final = "rollout.queued_s"
WEIGHT_VERSION: Final = "rollout.weight_version"
TURN: Final = "rollout.turn"
SEGMENT: Final = "rollout.segment"
BACKEND: Final = "rollout.backend"
SANDBOX: Final = "rollout.sandbox"
LINK: Final = "rollout.link"
"""The target of a link: `order`, the span that created the run, or `previous_attempt`."""

NOTED: Final = {
    "turn": TURN,
    "segment": SEGMENT,
    "version": WEIGHT_VERSION,
    "sandbox": SANDBOX,
    "prompt_tokens": INPUT_TOKENS,
    "tokens": OUTPUT_TOKENS,
    "cached_tokens": CACHED_TOKENS,
    "request": RESPONSE_ID,
    "call": TOOL_CALL_ID,
}
"""The attribute for each exported part of a step's detail. Text by agents, such as commands, is not exported."""

WAITS: Final = {
    StepKind.PLACE: "wait for a place",
    StepKind.WORKER: "wait for a worker",
    StepKind.HOST: "wait for the host",
    StepKind.POOL_QUEUE: "wait in the pool's queue",
    StepKind.PAUSED_POOL: "wait for a paused pool",
    StepKind.SUBAGENT: "wait for a sub-agent's slot",
    StepKind.STORE: "store",
}
"""Waits are spans only if they took a millisecond or more."""

WORK: Final = {
    StepKind.SANDBOX_START: "sandbox start",
    StepKind.SANDBOX_END: "sandbox end",
    StepKind.SESSION: "sandbox session",
    StepKind.SETUP: "setup",
    StepKind.ARTIFACTS: "artifacts",
    StepKind.GRADER: "evaluate",
    StepKind.JUDGE: "judge",
    StepKind.AGENT: "agent program",
}


def trace_id_of(rollout_id: str) -> int:
    """Return the id if the caller sent none: half of the rollout id's SHA-256, the same in every attempt."""
    return int.from_bytes(hashlib.sha256(rollout_id.encode()).digest()[:16])


class RolloutIds(RandomIdGenerator):
    """Random ids, except for `next_trace`, which no other span takes, since starting one waits for nothing."""

    def __init__(self) -> None:
        self.next_trace: int | None = None
        """The id of the next trace that begins without a parent."""

    def generate_trace_id(self) -> int:
        chosen, self.next_trace = self.next_trace, None
        return super().generate_trace_id() if chosen is None else chosen


# Attributes of requests to engines. Prompts and answers are never among them.

_PORTS = {"http": 80, "https": 443}


def server_attributes(backend: BackendView) -> dict[str, AttributeValue]:
    parts = urlsplit(backend.url)
    return {
        PROVIDER: str(backend.kind),
        SERVER_ADDRESS: parts.hostname or "",
        SERVER_PORT: parts.port or _PORTS.get(parts.scheme, 0),
    }


def request_attributes(request: object) -> dict[str, AttributeValue]:
    if not isinstance(request, GenerateRequest):
        return {}
    sampling = request.sampling
    attributes: dict[str, AttributeValue] = {
        REQUEST_TEMPERATURE: sampling.temperature,
        REQUEST_TOP_P: sampling.top_p,
        REQUEST_MAX_TOKENS: sampling.max_new_tokens,
    }
    if sampling.seed is not None:
        attributes[REQUEST_SEED] = sampling.seed
    return attributes


def answer_attributes(answer: object) -> dict[str, AttributeValue]:
    if not isinstance(answer, Generation):
        return {}
    attributes: dict[str, AttributeValue] = {
        FINISH_REASONS: [str(answer.finish_reason)],
        INPUT_TOKENS: answer.prompt_tokens,
        OUTPUT_TOKENS: len(answer.output_ids),
        CACHED_TOKENS: answer.cached_tokens,
    }
    if answer.versions:
        attributes[WEIGHT_VERSION] = answer.versions[-1]
    return attributes

"""What a span says of one request to an engine. Prompts and answers are never part of it."""

from __future__ import annotations

from urllib.parse import urlsplit

from opentelemetry.util.types import AttributeValue

from api_schemas.inference import BackendView
from rollout_service.engines.contract import GenerateRequest, Generation
from rollout_service.observability.tracing.otel import conventions as names

_PORTS = {"http": 80, "https": 443}


def server_attributes(backend: BackendView) -> dict[str, AttributeValue]:
    """Return the kind and the address of an engine."""
    parts = urlsplit(backend.url)
    return {
        names.PROVIDER: str(backend.kind),
        names.SERVER_ADDRESS: parts.hostname or "",
        names.SERVER_PORT: parts.port or _PORTS.get(parts.scheme, 0),
    }


def request_attributes(request: object) -> dict[str, AttributeValue]:
    """Return how a turn was to be sampled."""
    if not isinstance(request, GenerateRequest):
        return {}
    sampling = request.sampling
    attributes: dict[str, AttributeValue] = {
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_MAX_TOKENS: sampling.max_new_tokens,
    }
    if sampling.seed is not None:
        attributes[names.REQUEST_SEED] = sampling.seed
    return attributes


def answer_attributes(answer: object) -> dict[str, AttributeValue]:
    """Return what a turn cost, why it ended, and which weights sampled its last token."""
    if not isinstance(answer, Generation):
        return {}
    attributes: dict[str, AttributeValue] = {
        names.FINISH_REASONS: [str(answer.finish_reason)],
        names.INPUT_TOKENS: answer.prompt_tokens,
        names.OUTPUT_TOKENS: len(answer.output_ids),
        names.CACHED_TOKENS: answer.cached_tokens,
    }
    if answer.versions:
        attributes[names.WEIGHT_VERSION] = answer.versions[-1]
    return attributes

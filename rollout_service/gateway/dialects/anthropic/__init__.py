"""Anthropic's Messages."""

from __future__ import annotations

from typing import Any

from rollout_service.gateway.bounds import BoundedFields
from rollout_service.gateway.contract import Dialect
from rollout_service.gateway.dialects.anthropic.requests import PARAMETERS, read_call
from rollout_service.gateway.dialects.anthropic.responses import MessageStream, error_object, whole_message
from rollout_service.gateway.dialects.base import DialectCodec, ListedModel


def _model(model: ListedModel) -> dict[str, Any]:
    described = {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": "1970-01-01T00:00:00Z",
    }
    return described | ({"max_input_tokens": model.context_length} if model.context_length else {})


def _models(models: list[dict[str, Any]]) -> dict[str, Any]:
    names = [model["id"] for model in models] or [None]
    return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}


CODEC = DialectCodec(
    dialect=Dialect.ANTHROPIC,
    parameters=PARAMETERS,
    bounded=BoundedFields(messages="messages", tools="tools", schema="output_format", stops="stop_sequences"),
    read=lambda body, headers, _: read_call(body, headers),
    open_stream=MessageStream,
    whole=lambda call, answers: whole_message(call, answers[0]),
    error_body=lambda error: {"type": "error", "error": error_object(error)},
    counted=lambda tokens: {"input_tokens": tokens},
    describe_model=_model,
    list_models=_models,
)

"""OpenAI's Chat Completions."""

from __future__ import annotations

from typing import Any

from rollout_service.gateway.bounds import BoundedFields
from rollout_service.gateway.contract import Dialect
from rollout_service.gateway.dialects.base import DialectCodec, error_object, openai_model, openai_models
from rollout_service.gateway.dialects.openai_chat.requests import PARAMETERS, read_call
from rollout_service.gateway.dialects.openai_chat.responses import ChatStream, whole_completion


def _counted(tokens: int) -> dict[str, Any]:
    return {"count": tokens}


CODEC = DialectCodec(
    dialect=Dialect.CHAT,
    parameters=PARAMETERS,
    bounded=BoundedFields(messages="messages", tools="tools", schema="response_format", answers="n", stops="stop"),
    read=lambda body, headers, _: read_call(body, headers),
    open_stream=ChatStream,
    whole=whole_completion,
    error_body=lambda error: {"error": error_object(error)},
    counted=_counted,
    describe_model=openai_model,
    list_models=openai_models,
)

"""OpenAI's Responses."""

from __future__ import annotations

from typing import Any

from rollout_service.gateway.bounds import BoundedFields
from rollout_service.gateway.contract import Dialect
from rollout_service.gateway.dialects.base import DialectCodec, error_object, openai_model, openai_models
from rollout_service.gateway.dialects.openai_responses.requests import PARAMETERS, read_call
from rollout_service.gateway.dialects.openai_responses.responses import ResponseStream, whole_response


def _counted(tokens: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": tokens}


CODEC = DialectCodec(
    dialect=Dialect.RESPONSES,
    parameters=PARAMETERS,
    bounded=BoundedFields(messages="input", tools="tools", schema="text.format"),
    read=lambda body, headers, _: read_call(body, headers),
    open_stream=ResponseStream,
    whole=lambda call, answers: whole_response(call, answers[0]),
    error_body=lambda error: {"error": error_object(error)},
    counted=_counted,
    describe_model=openai_model,
    list_models=openai_models,
)

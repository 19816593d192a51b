"""Google's generateContent."""

from __future__ import annotations

from typing import Any

from rollout_service.gateway.bounds import BoundedFields
from rollout_service.gateway.contract import Dialect
from rollout_service.gateway.dialects.base import DialectCodec, ListedModel
from rollout_service.gateway.dialects.google.requests import PARAMETERS, read_call
from rollout_service.gateway.dialects.google.responses import CandidateStream, error_object, whole_content

_METHODS = ("generateContent", "streamGenerateContent", "countTokens")


def _model(model: ListedModel) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": f"models/{model.name}",
        "displayName": model.name,
        "version": "1",
        "supportedGenerationMethods": _METHODS,
    }
    limits = {"inputTokenLimit": model.context_length, "outputTokenLimit": model.context_length}
    return described | (limits if model.context_length else {})


CODEC = DialectCodec(
    dialect=Dialect.GOOGLE,
    parameters=PARAMETERS,
    bounded=BoundedFields(
        messages="contents",
        tools="tools",
        schema="generationConfig.responseSchema",
        answers="generationConfig.candidateCount",
        stops="generationConfig.stopSequences",
    ),
    read=read_call,
    open_stream=CandidateStream,
    whole=whole_content,
    error_body=lambda error: {"error": error_object(error)},
    counted=lambda tokens: {"totalTokens": tokens},
    describe_model=_model,
    list_models=lambda models: {"models": models},
)

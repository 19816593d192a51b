"""Google's generateContent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rollout_service.gateway.bounds import BoundedFields
from rollout_service.gateway.contract import Dialect, ModelCall
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.base import DialectCodec, ErrorAnswer, ListedModel, error_answer
from rollout_service.gateway.dialects.google.requests import PARAMETERS, read_call
from rollout_service.gateway.dialects.google.responses import CandidateStream, error_object, whole_content

_METHODS = ("generateContent", "streamGenerateContent", "countTokens")


class GoogleCodec(DialectCodec):
    dialect = Dialect.GOOGLE
    parameters = PARAMETERS
    bounded = BoundedFields(
        messages="contents",
        tools="tools",
        schema="generationConfig.responseSchema",
        answers="generationConfig.candidateCount",
        stops="generationConfig.stopSequences",
    )

    def read(self, body: bytes, headers: Mapping[str, str], path: str) -> ModelCall:
        return read_call(body, headers, path)

    def open_stream(self, call: ModelCall) -> CandidateStream:
        return CandidateStream(call)

    def whole(self, call: ModelCall, answers: Sequence[WholeAnswer]) -> bytes:
        return whole_content(call, answers)

    def error(self, error: BaseException) -> ErrorAnswer:
        return error_answer(error, {"error": error_object(error)})

    def token_count(self, tokens: int) -> bytes:
        return orjson.dumps({"totalTokens": tokens})

    def models(self, models: Sequence[ListedModel]) -> bytes:
        return orjson.dumps({"models": [_model_object(model) for model in models]})

    def model(self, model: ListedModel) -> bytes:
        return orjson.dumps(_model_object(model))


def _model_object(model: ListedModel) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": f"models/{model.name}",
        "displayName": model.name,
        "version": "1",
        "supportedGenerationMethods": _METHODS,
    }
    limits = {"inputTokenLimit": model.context_length, "outputTokenLimit": model.context_length}
    return described | (limits if model.context_length else {})

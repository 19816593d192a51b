"""Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rollout_service.gateway.bounds import BoundedFields
from rollout_service.gateway.contract import Dialect, ModelCall
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.anthropic.requests import PARAMETERS, read_call
from rollout_service.gateway.dialects.anthropic.responses import MessageStream, error_object, whole_message
from rollout_service.gateway.dialects.base import DialectCodec, ErrorAnswer, ListedModel, error_answer


class AnthropicCodec(DialectCodec):
    dialect = Dialect.ANTHROPIC
    parameters = PARAMETERS
    bounded = BoundedFields(messages="messages", tools="tools", schema="output_format", stops="stop_sequences")

    def read(self, body: bytes, headers: Mapping[str, str], path: str) -> ModelCall:  # noqa: ARG002
        return read_call(body, headers)

    def open_stream(self, call: ModelCall) -> MessageStream:
        return MessageStream(call)

    def whole(self, call: ModelCall, answers: Sequence[WholeAnswer]) -> bytes:
        return whole_message(call, answers[0])

    def error(self, error: BaseException) -> ErrorAnswer:
        return error_answer(error, {"type": "error", "error": error_object(error)})

    def token_count(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})

    def models(self, models: Sequence[ListedModel]) -> bytes:
        names = [model.name for model in models]
        return orjson.dumps(
            {
                "data": [_model_object(model) for model in models],
                "has_more": False,
                "first_id": names[0] if names else None,
                "last_id": names[-1] if names else None,
            }
        )

    def model(self, model: ListedModel) -> bytes:
        return orjson.dumps(_model_object(model))


def _model_object(model: ListedModel) -> dict[str, Any]:
    described = {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": "1970-01-01T00:00:00Z",
    }
    return described | ({"max_input_tokens": model.context_length} if model.context_length else {})

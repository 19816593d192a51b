"""OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from rollout_service.gateway.bounds import BoundedFields
from rollout_service.gateway.contract import Dialect, ModelCall
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.base import OpenAICodec
from rollout_service.gateway.dialects.openai_responses.requests import PARAMETERS, read_call
from rollout_service.gateway.dialects.openai_responses.responses import ResponseStream, whole_response


class ResponsesCodec(OpenAICodec):
    dialect = Dialect.RESPONSES
    parameters = PARAMETERS
    bounded = BoundedFields(messages="input", tools="tools", schema="text.format")

    def read(self, body: bytes, headers: Mapping[str, str], path: str) -> ModelCall:  # noqa: ARG002
        return read_call(body, headers)

    def open_stream(self, call: ModelCall) -> ResponseStream:
        return ResponseStream(call)

    def whole(self, call: ModelCall, answers: Sequence[WholeAnswer]) -> bytes:
        return whole_response(call, answers[0])

    def token_count(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

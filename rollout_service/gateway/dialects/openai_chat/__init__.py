"""OpenAI's Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from rollout_service.gateway.bounds import BoundedFields
from rollout_service.gateway.contract import Dialect, ModelCall
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.base import OpenAICodec
from rollout_service.gateway.dialects.openai_chat.requests import PARAMETERS, read_call
from rollout_service.gateway.dialects.openai_chat.responses import ChatStream, whole_completion


class ChatCodec(OpenAICodec):
    dialect = Dialect.CHAT
    parameters = PARAMETERS
    bounded = BoundedFields(messages="messages", tools="tools", schema="response_format", answers="n", stops="stop")

    def read(self, body: bytes, headers: Mapping[str, str], path: str) -> ModelCall:  # noqa: ARG002
        return read_call(body, headers)

    def open_stream(self, call: ModelCall) -> ChatStream:
        return ChatStream(call)

    def whole(self, call: ModelCall, answers: Sequence[WholeAnswer]) -> bytes:
        return whole_completion(call, answers)

    def token_count(self, tokens: int) -> bytes:
        return orjson.dumps({"count": tokens})

"""OpenAI's Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from rollout_service.gateway.bounds import BoundedFields
from rollout_service.gateway.contract import Dialect, ModelCall
from rollout_service.gateway.dialects import base
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.base import DialectCodec, ErrorAnswer, ListedModel
from rollout_service.gateway.dialects.openai_chat.requests import PARAMETERS, read_call
from rollout_service.gateway.dialects.openai_chat.responses import ChatStream, whole_completion


class ChatCodec(DialectCodec):
    dialect = Dialect.CHAT
    parameters = PARAMETERS
    bounded = BoundedFields(messages="messages", tools="tools", schema="response_format", answers="n", stops="stop")

    def read(self, body: bytes, headers: Mapping[str, str], path: str) -> ModelCall:  # noqa: ARG002
        return read_call(body, headers)

    def open_stream(self, call: ModelCall) -> ChatStream:
        return ChatStream(call)

    def whole(self, call: ModelCall, answers: Sequence[WholeAnswer]) -> bytes:
        return whole_completion(call, answers)

    def error(self, error: BaseException) -> ErrorAnswer:
        return base.error_answer(error)

    def token_count(self, tokens: int) -> bytes:
        return orjson.dumps({"count": tokens})

    def models(self, models: Sequence[ListedModel]) -> bytes:
        return base.model_list(models)

    def model(self, model: ListedModel) -> bytes:
        return base.model_body(model)

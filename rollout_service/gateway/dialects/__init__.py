"""The dialects: each reads requests and writes answers, streams and errors as its clients expect them."""

from collections.abc import Mapping
from types import MappingProxyType

from rollout_service.gateway.contract import Dialect
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.anthropic import responses as anthropic
from rollout_service.gateway.dialects.base import (
    AnswerStream,
    DialectCodec,
    ErrorAnswer,
    ListedModel,
    client_name,
)
from rollout_service.gateway.dialects.google import responses as google
from rollout_service.gateway.dialects.openai_chat import responses as openai_chat
from rollout_service.gateway.dialects.openai_responses import responses as openai_responses

CODECS: Mapping[Dialect, DialectCodec] = MappingProxyType(
    {each.CODEC.dialect: each.CODEC for each in (openai_chat, openai_responses, anthropic, google)}
)

__all__ = [
    "CODECS",
    "AnswerStream",
    "DialectCodec",
    "ErrorAnswer",
    "ListedModel",
    "WholeAnswer",
    "client_name",
]

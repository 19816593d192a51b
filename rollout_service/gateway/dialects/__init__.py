"""The dialects: each reads requests and writes answers, streams and errors as its clients expect them."""

from collections.abc import Mapping
from types import MappingProxyType

from rollout_service.gateway.contract import Dialect
from rollout_service.gateway.dialects import anthropic, google, openai_chat, openai_responses
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.base import (
    AnswerStream,
    DialectCodec,
    ErrorAnswer,
    ListedModel,
    client_name,
)

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

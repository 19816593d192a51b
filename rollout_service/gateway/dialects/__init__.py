"""The dialects: each reads requests and writes answers, streams and errors as its clients expect them."""

from collections.abc import Mapping
from types import MappingProxyType

from rollout_service.gateway.contract import Dialect
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.anthropic import AnthropicCodec
from rollout_service.gateway.dialects.base import (
    AnswerStream,
    DialectCodec,
    ErrorAnswer,
    ListedModel,
    client_name,
)
from rollout_service.gateway.dialects.google import GoogleCodec
from rollout_service.gateway.dialects.openai_chat import ChatCodec
from rollout_service.gateway.dialects.openai_responses import ResponsesCodec

CODECS: Mapping[Dialect, DialectCodec] = MappingProxyType(
    {codec.dialect: codec for codec in (ChatCodec(), ResponsesCodec(), AnthropicCodec(), GoogleCodec())}
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

"""The dialects: each reads requests and writes answers, streams and errors as its clients expect them."""

from collections.abc import Mapping
from types import MappingProxyType

from rollout_service.gateway.contract import Dialect
from rollout_service.gateway.dialects.answers import WholeAnswer
from rollout_service.gateway.dialects.anthropic_answers import CODEC as ANTHROPIC
from rollout_service.gateway.dialects.base import (
    AnswerStream,
    DialectCodec,
    ErrorAnswer,
    ListedModel,
    client_name,
)
from rollout_service.gateway.dialects.google_answers import CODEC as GOOGLE
from rollout_service.gateway.dialects.openai_chat_answers import CODEC as OPENAI_CHAT
from rollout_service.gateway.dialects.openai_responses_answers import CODEC as OPENAI_RESPONSES

CODECS: Mapping[Dialect, DialectCodec] = MappingProxyType(
    {codec.dialect: codec for codec in (OPENAI_CHAT, OPENAI_RESPONSES, ANTHROPIC, GOOGLE)}
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

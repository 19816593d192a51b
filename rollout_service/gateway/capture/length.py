"""Compares a prompt with the model's context before it is rendered, which takes 36 bytes for each of its tokens.

A prompt that is not refused here may still be too long: the ids of what is rendered tell exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from rollout_service.gateway.capture.matching import Match
from rollout_service.gateway.contract import ClientMessage, ModelCall
from rollout_service.gateway.errors import ContextOverflowError
from rollout_service.tokens import ChatRenderer

_SPOKEN_CHARS = 32
"""How many characters an agent's own answers may have for each token of the context. Many chat formats leave out what
it thought, so these are not counted; no prompt has as many."""


def check_length(
    renderer: ChatRenderer,
    call: ModelCall,
    messages: Sequence[ClientMessage],
    match: Match,
    context_length: int,
) -> None:
    """Refuse a prompt that is surely longer than the context.

    Raises:
        ContextOverflowError: It is; its count of tokens is an estimate.
    """
    known, new = (match.turn.turn.end, messages[match.begin :]) if match.turn is not None else (0, messages)
    room = max(context_length - known, 1)
    texts = [message.text for message in new if message.role != "assistant"]
    if match.turn is None and call.tools:
        texts.append(orjson.dumps([dict(tool) for tool in call.tools]).decode())
    spoken = sum([_spoken_chars(message) for message in new if message.role == "assistant"])
    tokens = renderer.count_if_over(texts, room)
    if tokens is None and spoken > _SPOKEN_CHARS * room:
        tokens = spoken // _SPOKEN_CHARS
    if tokens is not None:
        raise ContextOverflowError(known + tokens, context_length)


def _spoken_chars(message: ClientMessage) -> int:
    calls = sum([len(call.arguments) for call in message.calls])
    return len(message.text) + len(message.reasoning or "") + calls

"""Calls of programs without the secrets of their environment, which a program's own tools may print."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rollout_service.base.masking import mask, mask_texts
from rollout_service.gateway.contract import ClientMessage, ModelCall


def masked_call(call: ModelCall, hidden: Collection[str]) -> ModelCall:
    """Return a call with these values masked in its messages and tools; the same one if there are none.

    The policy's own answers come back as it wrote them, unless it wrote such a value by itself.
    """
    if not hidden:
        return call
    return replace(
        call,
        messages=tuple(_masked(message, hidden) for message in call.messages),
        tools=mask_texts(call.tools, hidden),
        deferred_tools=mask_texts(call.deferred_tools, hidden),
    )


def _masked(message: ClientMessage, hidden: Collection[str]) -> ClientMessage:
    calls = tuple(replace(one, arguments=mask(one.arguments, hidden)) for one in message.calls)
    reasoning = mask_texts(message.reasoning, hidden)
    return replace(message, text=mask(message.text, hidden), reasoning=reasoning, calls=calls)

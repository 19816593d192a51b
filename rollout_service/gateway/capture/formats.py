"""What of a model's chat format can be told from its tokens while they are sampled.

In every format here a part begins and ends with control tokens, so that text which only looks like one ends nothing. In
all other formats an answer is read when it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout_service.tokens import ChatRenderer

_JSON = frozenset({"qwen3", "qwen3-vl"})
_XML = frozenset(
    {"qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"}
)
_TAGGED = frozenset({"glm-4.5", "glm-5", "glm-5.1", "glm-5.3"})


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The control tokens between the parts of an answer, and what follows from them."""

    think: int
    think_end: int
    call: int
    call_end: int
    json_calls: bool
    """Whether calls are JSON objects, of which the arguments can be told before their end."""
    tagged: bool
    """Whether a call ends reasoning, text goes on after a call, and reasoning may begin anywhere."""
    text_ends_reasoning: bool
    """Whether the text of the token that ends reasoning ends it too, spelled out."""


def stream_format(renderer: ChatRenderer) -> StreamFormat | None:
    """Return what is known of a chat format, or None if its answers are read only when they are complete."""
    if renderer.name not in _JSON | _XML | _TAGGED:
        return None
    found = [renderer.encode(text) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    if any(len(ids) != 1 for ids in found):
        return None
    think, think_end, call, call_end = (ids[0] for ids in found)
    is_json = renderer.name in _JSON
    return StreamFormat(think, think_end, call, call_end, is_json, renderer.name in _TAGGED, is_json)

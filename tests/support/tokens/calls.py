"""Calls as each chat format itself writes them: the format's own render, without what a policy does not sample."""

from collections.abc import Callable, Mapping
from typing import Any

from api_schemas.trajectories import Message, ToolCall
from rollout_service.tokens import ChatRenderer

USER = Message(role="user", content="go")
STRING = {"type": "string"}
PROPERTIES: dict[str, Any] = {
    "path": STRING,
    "text": STRING,
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "nothing": {"type": "null"},
    "items": {"type": "array"},
    "table": {"type": "object"},
    "maybe": {"anyOf": [STRING, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
    "color": {"$ref": "#/$defs/Color"},
    "any": {},
}
PARAMETERS = {
    "type": "object",
    "properties": PROPERTIES,
    "$defs": {"Color": {"enum": ["red", "1"], "type": "string"}},
}
TOOL = {
    "type": "function",
    "function": {"name": "write", "description": "Write a file.", "parameters": PARAMETERS},
}
_LEAVE_REASONING = {"deepseek-r1": "</think>", "gpt-oss": "<|end|><|start|>assistant"}
"""How to leave the reasoning that a prompt began, in formats which leave it out of earlier turns."""


def written(renderer: ChatRenderer, *calls: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return a prompt, and a turn that calls the tool with each of these arguments as the format writes it."""
    made = [
        ToolCall(id=f"functions.write:{i}", name="write", arguments=dict(one), raw="") for i, one in enumerate(calls)
    ]
    prompt = renderer.render([USER], [TOOL])
    whole = renderer.render([USER, Message(role="assistant", content="", tool_calls=made)], [TOOL])
    pairs = enumerate(zip(prompt, whole, strict=False))
    begin = next((i for i, (one, other) in pairs if one != other), len(prompt))
    turn = whole[begin:]
    end = next((i + 1 for i, token in enumerate(turn) if token in renderer.stop_token_ids), len(turn))
    return prompt, [*renderer.encode(_LEAVE_REASONING.get(renderer.name, "")), *turn[:end]]


def _xml(arguments: Mapping[str, str]) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=write>\n{values}</function>\n</tool_call>"


def _tagged(arguments: Mapping[str, str]) -> str:
    values = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>write\n{values}</tool_call>"


BY_PARSER: dict[str, Callable[[Mapping[str, str]], str]] = {"qwen3.5": _xml, "glm": _tagged}
"""How calls are written, by the `tool_parser` of a format that is known only by its template."""

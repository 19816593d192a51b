"""Recorded conversations of real agents, replayed through capture with answers that are written anew."""

import json
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from rollout_service.gateway.capture import TurnCapture
from rollout_service.gateway.contract import Dialect
from rollout_service.tokens import ChatRenderer, ToolSpec
from tests.support.gateway.echoing import Answered, ask, write
from tests.support.gateway.recordings import Recorded, load


def said(recorded: Recorded) -> tuple[str, str]:
    """Return the text and the reasoning of a recorded answer."""
    answer = recorded.answer
    match recorded.dialect:
        case Dialect.CHAT:
            message = (answer.get("choices") or [{"message": {}}])[0]["message"]
            return message.get("content") or "", message.get("reasoning_content") or ""
        case Dialect.RESPONSES:
            items = answer.get("output", ())
            texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
            summaries = [item for item in items if item["type"] == "reasoning"]
            thoughts = [part["text"] for item in summaries for part in item.get("summary", ())]
            return "".join(texts), "".join(thoughts)
        case Dialect.ANTHROPIC:
            blocks = answer.get("content", ())
            return (
                "".join(block["text"] for block in blocks if block["type"] == "text"),
                "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            )
        case Dialect.GOOGLE:
            parts = [p for one in answer.get("candidates", ()) for p in one["content"]["parts"] if "text" in p]
            return (
                "".join(part["text"] for part in parts if not part.get("thought")),
                "".join(part["text"] for part in parts if part.get("thought")),
            )


def as_json(arguments: str) -> str:
    """Return the arguments of a call; those of a tool that takes a text are its one parameter."""
    return json.dumps({"input": arguments}) if arguments.startswith("***") else arguments


def declared(tool: ToolSpec, calls: Iterable[tuple[str, str]]) -> ToolSpec:
    """Return a tool with all the parameters that it was called with; a filler may stand for some of them."""
    function = tool["function"]
    parameters = function.get("parameters", {})
    names = set()
    for name, arguments in calls:
        try:
            names |= set(json.loads(arguments)) if name == function["name"] else set()
        except ValueError:
            continue
    types = {name: {"type": "string"} for name in sorted(names)}
    properties = {**types, **parameters.get("properties", {})}
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": properties}}}


def replay(renderer: ChatRenderer, name: str) -> tuple[TurnCapture, list[Answered]]:
    """Replay a recording; its answers are written anew, and known to the client by its own ids."""
    capture = TurnCapture(renderer)
    ids: dict[str | None, str] = {}
    answered: list[Answered] = []
    made = [(each.name, as_json(each.arguments)) for recorded in load(name) for each in recorded.calls]
    for recorded in load(name):
        call = recorded.read()
        messages = tuple(
            message._replace(
                call_id=ids.get(message.call_id, message.call_id),
                turn_key=None,
                calls=tuple(replace(each, id=ids.get(each.id, each.id)) for each in message.calls),
            )
            for message in call.messages
        )
        text, reasoning = said(recorded)
        calls = [(each.name, as_json(each.arguments)) for each in recorded.calls]
        call = replace(call, tools=tuple(declared(tool, made) for tool in call.tools))
        output = write(renderer, text, *calls, reasoning=reasoning)
        one = ask(capture, replace(call, messages=messages, stop=()), output, Random(0))
        ids |= {old.id: new.id for old, new in zip(recorded.calls, one.message.calls, strict=False)}
        answered.append(one)
    return capture, answered

"""Recorded requests of real agents, and the answers that they got.

`tests/fixtures/agent_clis/NAME.jsonl` is the run of five turns of an agent, `NAME-CASE.jsonl` a special case. The texts
of the agents are replaced by fillers of the same length. In a list, `=` stands for the element at this place of the
request before; in the place of headers or a field, `=previous` for all of it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_service.gateway.contract import Dialect, ModelCall
from rollout_service.gateway.dialects import CODECS
from rollout_service.gateway.dialects.openai_responses_requests import flat_name

FOLDER = Path(__file__).parents[2] / "fixtures" / "agent_clis"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
LISTS = ("messages", "input", "contents", "tools")
SAME, PREVIOUS = "=", "=previous"
DIALECTS = {
    "chat": Dialect.CHAT,
    "responses": Dialect.RESPONSES,
    "messages": Dialect.ANTHROPIC,
    "gemini": Dialect.GOOGLE,
}


@dataclass(frozen=True)
class AnsweredCall:
    """A call that an agent was answered with, its arguments as they were sent."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Recorded:
    """One recorded request, and what was answered."""

    name: str
    number: int
    dialect: Dialect
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    answer: dict[str, Any]
    calls: tuple[AnsweredCall, ...] = field(default=())

    def read(self) -> ModelCall:
        """Read the request as the gateway does."""
        return CODECS[self.dialect].read(json.dumps(self.body).encode(), self.headers, self.path)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, one in inner for found in places(one, (*path, key)))]


def load(name: str) -> list[Recorded]:
    """Return the model calls of a recording, in their order."""
    return list(_load(FOLDER / f"{name}.jsonl"))


def _load(path: Path) -> Iterator[Recorded]:
    headers: dict[str, str] = {}
    before: dict[str, Any] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        entry = json.loads(line)
        headers = headers if entry["headers"] == PREVIOUS else entry["headers"]
        if entry.get("dialect") not in DIALECTS:
            continue
        body = expand(entry["body"], before)
        before = before | body
        dialect, answer = DIALECTS[entry["dialect"]], entry["answer"]
        calls = tuple(_calls(dialect, answer, entry["raw"]))
        yield Recorded(path.stem, number, dialect, entry["path"], headers, body, answer, calls)


def expand(body: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return a body with what it shares with those before, of which `before` has the last value of each field."""
    whole = {name: before[name] if value == PREVIOUS else value for name, value in body.items()}
    for name in LISTS:
        if isinstance(whole.get(name), list):
            whole[name] = [before[name][index] if item == SAME else item for index, item in enumerate(whole[name])]
    return whole


def _calls(dialect: Dialect, answer: dict[str, Any], raw: list[str]) -> Iterator[AnsweredCall]:
    for (call_id, name), arguments in zip(_names(dialect, answer), raw, strict=False):
        yield AnsweredCall(call_id, name, arguments)


def _names(dialect: Dialect, answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    match dialect:
        case Dialect.CHAT:
            messages = [choice["message"] for choice in answer.get("choices", ())]
            calls = [call for message in messages for call in message.get("tool_calls", ())]
            return ((call["id"], call["function"]["name"]) for call in calls)
        case Dialect.RESPONSES:
            items = [item for item in answer.get("output", ()) if "call_id" in item]
            return ((item["call_id"], flat_name(item.get("namespace"), item["name"])) for item in items)
        case Dialect.ANTHROPIC:
            blocks = [block for block in answer.get("content", ()) if block["type"] == "tool_use"]
            return ((block["id"], block["name"]) for block in blocks)
        case Dialect.GOOGLE:
            parts = [part for one in answer.get("candidates", ()) for part in one["content"]["parts"]]
            functions = [part["functionCall"] for part in parts if "functionCall" in part]
            return ((function["id"], function["name"]) for function in functions)

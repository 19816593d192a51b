"""A scripted model: fixed turns from a file, to try an environment without a policy.

A turn is a line of JSON: `{"content": "...", "tool_calls": [{"name": "bash", "arguments": {...}}]}`, both optional.
Turns are written in the format of the shipped policies, whose tokenizer can encode any text.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from rollout_service.base.validation import describe_problems
from rollout_service.cli.common import CommandError
from rollout_service.cli.submit.inputs import read_whole
from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Replies, ScriptedEngine

POLICY = "calc-tuned"
END = "<|im_end|>"
TURN_HINT = 'Write one turn per line, such as {"content": "42"} or {"tool_calls": [{"name": "bash", "arguments": {}}]}.'


class ScriptedCall(BaseModel):
    """A tool call."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    arguments: dict[str, JsonValue] = {}

    def text(self) -> str:
        """Return the call as a policy writes it."""
        return f"<tool_call>\n{json.dumps(self.model_dump(), ensure_ascii=False)}\n</tool_call>"


class ScriptedTurn(BaseModel):
    """One answer of the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    content: str = ""
    tool_calls: list[ScriptedCall] = []

    def text(self) -> str:
        """Return the turn as a policy writes it."""
        parts = [self.content, *(call.text() for call in self.tool_calls)]
        return "\n".join(part for part in parts if part) + END


def read_turns(path: Path) -> list[str]:
    """Return the texts of the turns in a file.

    Raises:
        CommandError: The file has no turns, or a line is not a turn; the message has its number.
    """
    turns = []
    for number, line in enumerate(read_whole(path).split(b"\n"), start=1):
        if line.strip():
            try:
                turns.append(ScriptedTurn.model_validate_json(line).text())
            except ValidationError as error:
                what = "; ".join(describe_problems(error, ScriptedTurn))
                raise CommandError(f"{path}, line {number}: {what}", hint=TURN_HINT) from error
    if not turns:
        raise CommandError(f"the script {path} has no turns", hint=TURN_HINT)
    return turns


def scripted_engine(turns: list[str]) -> ScriptedEngine:
    """Return an engine that answers with these turns in order; enter it as an async context manager."""
    folder = policy_folder(POLICY)
    vocab_size = json.loads((folder / "config.json").read_bytes())["vocab_size"]
    return ScriptedEngine(Replies.from_texts(turns, folder), vocab_size=vocab_size, model_path=folder)

"""Clients that keep their own history, each with the habits of a real one, and a policy that writes what it is told."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from api_schemas.trajectories import FinishReason
from rollout_service.gateway.capture import PlannedTurn, TurnCapture
from rollout_service.gateway.contract import (
    AnswerEnd,
    CallArguments,
    CallBegin,
    ClientMessage,
    ClientToolCall,
    Dialect,
    Lane,
    ModelCall,
    ReasoningDelta,
    TextDelta,
)
from rollout_service.tokens import ChatRenderer
from tests.support.samples import generation

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
            "required": ["command"],
        },
    },
}
OTHER = {**BASH, "function": {**BASH["function"], "name": "python"}}


@dataclass(frozen=True)
class Habits:
    """How a client sends an answer back."""

    arguments: Callable[[str], str] = str
    """A function from the arguments as they were sent to those in the history."""
    keeps_reasoning: bool = True
    keeps_ids: bool = True
    carries_key: bool = False
    """Whether the dialect carries the turn's key, such as in a signature."""
    text: Callable[[str], str] = str
    reminder_every: int = 0
    """After how many turns a system message follows the results."""
    newest_first: bool = False
    """Whether results of parallel calls come in the reverse order."""
    tags_reasoning: bool = False
    """Whether the reasoning is in the text, between tags."""


def respelled(arguments: str) -> str:
    """Return arguments as JSON.stringify would write them, or as they are if they are not JSON."""
    try:
        return json.dumps(_integers(json.loads(arguments)), separators=(",", ":"), ensure_ascii=False)
    except ValueError:
        return arguments


def in_schema_order(arguments: str) -> str:
    """Return arguments written anew with their keys in another order."""
    try:
        return json.dumps(_integers(json.loads(arguments)), sort_keys=True)
    except ValueError:
        return json.dumps({"__unparsedToolInput": {"raw": arguments}})


def _integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _integers(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


CLIENTS = {
    "codex": Habits(carries_key=True),
    "claude": Habits(arguments=in_schema_order, carries_key=True, reminder_every=5, newest_first=True),
    "qwen_code": Habits(arguments=respelled),
    "gemini_cli": Habits(arguments=respelled, keeps_reasoning=False, carries_key=True),
    "gemini_without_ids": Habits(arguments=respelled, keeps_reasoning=False, keeps_ids=False),
    "opencode": Habits(arguments=respelled),
    "pi": Habits(arguments=respelled, text=str.strip),
    "cline": Habits(arguments=respelled),
    "mini_swe_agent": Habits(),
    "openai_agents": Habits(keeps_reasoning=False),
    "langchain": Habits(arguments=respelled, keeps_reasoning=False),
    "pydantic_ai": Habits(arguments=respelled, keeps_reasoning=False, tags_reasoning=True),
    "openhands": Habits(arguments=respelled, keeps_reasoning=False, text=str.strip),
}


@dataclass
class Answered:
    """What came of one call."""

    planned: PlannedTurn
    output_ids: list[int]
    message: ClientMessage
    end: AnswerEnd


def ask(
    capture: TurnCapture,
    call: ModelCall,
    output_ids: Sequence[int],
    random: Random,
    *,
    delivered: bool = True,
    finish: FinishReason = FinishReason.STOP,
) -> Answered:
    """Send a call, sample these ids in pieces, record the turn, and return the answer as the client sees it."""
    planned = capture.plan(call)
    return answer(capture, planned, output_ids, random, delivered=delivered, finish=finish)


def answer(
    capture: TurnCapture,
    planned: PlannedTurn,
    output_ids: Sequence[int],
    random: Random,
    *,
    delivered: bool = True,
    finish: FinishReason = FinishReason.STOP,
) -> Answered:
    """Answer a planned call with these ids."""
    ids = list(output_ids)
    fed = random.randint(0, len(ids))
    events, at = [], 0
    while at < fed:
        size = random.randint(1, 7)
        events += planned.feed(ids[at : min(at + size, fed)])
        at = min(at + size, fed)
    prompt, known = len(planned.prompt_ids), planned.known
    answer = generation(ids, finish_reason=finish, prompt_tokens=prompt, cached_tokens=known)
    events += planned.finish(answer)
    capture.record(planned, answer, delivered=delivered)
    *told, end = events
    assert isinstance(end, AnswerEnd)
    calls: list[ClientToolCall] = []
    for event in told:
        if isinstance(event, CallBegin):
            calls.append(ClientToolCall(event.call_id, event.name, ""))
        elif isinstance(event, CallArguments):
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + event.text)
    message = ClientMessage(
        role="assistant",
        text="".join(event.text for event in told if isinstance(event, TextDelta)),
        reasoning="".join(event.text for event in told if isinstance(event, ReasoningDelta)) or None,
        calls=tuple(calls),
        turn_key=planned.turn_key,
    )
    return Answered(planned, ids, message, end)


@dataclass
class EchoingClient:
    """A client with its history, which it sends as a whole each time."""

    capture: TurnCapture
    habits: Habits
    random: Random
    messages: list[ClientMessage] = field(default_factory=list)
    tools: tuple[Any, ...] = (BASH,)
    lane: Lane = field(default_factory=Lane)
    turns: list[Answered] = field(default_factory=list)

    def call(self, **options: Any) -> ModelCall:
        """Return the next request."""
        return ModelCall(
            dialect=Dialect.CHAT,
            model="policy",
            messages=tuple(self.messages),
            tools=self.tools,
            lane=self.lane,
            **options,
        )

    def turn(self, output_ids: Sequence[int], *results: str) -> Answered:
        """Ask, keep the answer in the habitual form, and add the results of its calls."""
        answered = ask(self.capture, self.call(), output_ids, self.random)
        self.keep(answered, *results)
        return answered

    def keep(self, answered: Answered, *results: str) -> None:
        """Add an answer and the results of its calls to the history."""
        self.turns.append(answered)
        self.messages.append(self.echo(answered.message))
        calls = list(zip(answered.message.calls, results, strict=False))
        for call, result in reversed(calls) if self.habits.newest_first else calls:
            call_id = call.id if self.habits.keeps_ids else None
            self.messages.append(ClientMessage("tool", result, call_id=call_id, tool_name=call.name))
        every = self.habits.reminder_every
        if every and len(self.turns) % every == 0:
            self.messages.append(ClientMessage("system", f"Reminder {len(self.turns)}."))

    def echo(self, message: ClientMessage) -> ClientMessage:
        """Return an answer as this client sends it back."""
        habits = self.habits
        thought = f"<think>\n{message.reasoning}\n</think>" if habits.tags_reasoning and message.reasoning else ""
        return message._replace(
            text=thought + habits.text(message.text),
            reasoning=message.reasoning if habits.keeps_reasoning else None,
            calls=tuple(
                replace(call, id=call.id if habits.keeps_ids else None, arguments=habits.arguments(call.arguments))
                for call in message.calls
            ),
            turn_key=message.turn_key if habits.carries_key else None,
        )


def write(
    renderer: ChatRenderer, text: str, *calls: tuple[str, str], reasoning: str = "", stop: bool = True
) -> list[int]:
    """Return the ids of an answer as a policy of this format writes it; calls have a name and JSON arguments."""
    # Formats that begin inside their reasoning write only its end.
    thought = f"{reasoning}\n</think>\n\n" if renderer.name == "qwen3.5" else f"<think>\n{reasoning}\n</think>\n\n"
    thought = thought if reasoning or renderer.name == "qwen3.5" else ""
    block = _xml_call if renderer.name == "qwen3.5" else _json_call
    written = thought + text + "".join("\n" + block(*call) for call in calls)
    return [*renderer.encode(written), *renderer.stop_token_ids[:1] * stop]


def _json_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _xml_call(name: str, arguments: str) -> str:
    try:
        values = json.loads(arguments)
    except ValueError:
        values = {"timeout": arguments}
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

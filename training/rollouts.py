"""Rollouts of `calc` in one process, with the service's token code, and arithmetic in place of a sandbox."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers

from api_schemas.trajectories import FinishReason, Message
from rollout_service.environments.builtin.calc import CalcProblem, evaluate_expression
from rollout_service.tokens import AssistantTurn, ChatRenderer, Conversation
from training.examples import Setup, open_conversation
from training.model import PAD_ID, STOP_ID

MAX_TURNS = 4
MAX_TURN_TOKENS = 64
AT_ONCE = 128
_PRINT = re.compile(r"print\((?!.*\*\s*\*)(.{1,80})\)", re.DOTALL)


@dataclass(slots=True)
class Attempt:
    """One rollout: its conversation and its outcome."""

    problem: CalcProblem
    conversation: Conversation
    done: bool = False
    right_call: bool = False
    answer: str | None = None

    @property
    def success(self) -> bool:
        return self.answer == self.problem["answer"]


def run_tool(code: str) -> str:
    """Return what the tool `python` would print for `print` of an arithmetic expression."""
    match = _PRINT.fullmatch(code.strip())
    try:
        return str(evaluate_expression(match[1])) if match else "SyntaxError: invalid syntax"
    except ValueError as error:
        return f"SyntaxError: {error}"


def roll_out(
    model: transformers.Qwen3ForCausalLM,
    renderer: ChatRenderer,
    setup: Setup,
    problems: Sequence[CalcProblem],
    temperature: float,
) -> list[Attempt]:
    """Roll out all problems in parallel; temperature 0 is greedy."""
    attempts = [Attempt(p, open_conversation(renderer, setup, p["question"])) for p in problems]
    for _ in range(MAX_TURNS):
        live = [attempt for attempt in attempts if not attempt.done]
        turns = sample_turns(model, [attempt.conversation for attempt in live], temperature)
        for attempt, turn in zip(live, turns, strict=True):
            _take(attempt, turn)
    return attempts


def _take(attempt: Attempt, turn: AssistantTurn) -> None:
    if not turn.tool_calls:
        match = re.search(r"\\boxed\{(-?\d+)\}", turn.message.content)
        attempt.answer, attempt.done = (match[1] if match else None), True
        return
    attempt.conversation.append(_answers(attempt, turn))


def _answers(attempt: Attempt, turn: AssistantTurn) -> list[Message]:
    answers = []
    for call in turn.tool_calls:
        code = (call.arguments or {}).get("code")
        if turn.turn_id == 0:
            attempt.right_call = code == f"print({attempt.problem['expression']})"
        content = run_tool(code) if isinstance(code, str) else f"Error: malformed tool call: {call.error}"
        answers.append(Message(role="tool", content=content, tool_call_id=call.id))
    return answers


def sample_turns(
    model: transformers.Qwen3ForCausalLM, conversations: Sequence[Conversation], temperature: float
) -> list[AssistantTurn]:
    """Sample the next turn of each conversation, and record it there."""
    turns = []
    for start in range(0, len(conversations), AT_ONCE):
        chunk = conversations[start : start + AT_ONCE]
        outputs = _generate(model, [conversation.prompt() for conversation in chunk], temperature)
        for conversation, output in zip(chunk, outputs, strict=True):
            finish = FinishReason.STOP if STOP_ID in output else FinishReason.LENGTH
            turns.append(conversation.record(output, [0.0] * len(output), [0] * len(output), finish))
    return turns


@torch.no_grad()
def _generate(
    model: transformers.Qwen3ForCausalLM, prompts: Sequence[Sequence[int]], temperature: float
) -> list[list[int]]:
    """Sample one turn for each prompt, ended by its stop token, without truncating the distribution."""
    length = max(map(len, prompts))
    ids = torch.full((len(prompts), length), PAD_ID)
    attention = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
        attention[row, length - len(prompt) :] = 1
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature > 0
        else {"do_sample": False}
    )
    model.eval()
    sampled = model.generate(
        input_ids=ids,
        attention_mask=attention,
        max_new_tokens=MAX_TURN_TOKENS,
        eos_token_id=STOP_ID,
        pad_token_id=PAD_ID,
        **sampling,
    )[:, length:].tolist()
    return [row[: row.index(STOP_ID) + 1] if STOP_ID in row else row for row in sampled]

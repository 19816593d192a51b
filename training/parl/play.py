"""Rollouts of `pointers` and `split` in one process: the orchestrator and its sub-agents are the same policy.

The service's token code makes every prompt. Steps are counted as the environments do: a turn costs its direct calls, at
least one, and the longest sub-agent of each wave; nothing begins beyond the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import transformers

from api_schemas.rollouts.trees import InvalidBecause
from api_schemas.trajectories import Message, ToolCall
from rollout_service.agents.parallel.tools import ASSIGN, CREATE, created_text, marked_result, result_text
from rollout_service.environments.builtin import lookups
from rollout_service.environments.builtin.lookups import written_sum
from rollout_service.tokens import AssistantTurn, ChatRenderer, Conversation
from training.examples import Setup, open_conversation
from training.parl.setups import subagent
from training.rollouts import sample_turns

BUDGET = lookups.MAX_CRITICAL_STEPS
SLOTS = lookups.PARALLEL.max_width or lookups.PARALLEL.max_assigns_per_turn
MAX_ASSIGNS = lookups.PARALLEL.max_assigns_per_turn
MAX_TURNS = lookups.LIMITS.max_turns
SUB_TURNS = 9


@dataclass(frozen=True, slots=True)
class PlayedTask:
    """A task of either environment."""

    setup: Setup
    question: str
    cells: Mapping[str, str]
    expected: int
    index: str | None = None
    """What the tool `index` says."""


@dataclass(slots=True)
class SubAgent:
    """One assigned task."""

    system: str
    task: str
    cells: Mapping[str, str]
    conversation: Conversation
    turns: int = 0
    calls: int = 0
    result: str = ""
    invalid: InvalidBecause | None = InvalidBecause.MAX_TURNS
    done: bool = False

    @property
    def right(self) -> bool:
        """Whether it did what it was told: the value behind a key, or the values of its items."""
        keys = self.task.split(" ")
        held = [self.cells.get(key, "") for key in keys]
        held = [self.cells.get(text, text) for text in held]
        return self.invalid is None and self.result == "+".join(held)


@dataclass(slots=True)
class Attempt:
    """One rollout: its conversation, its steps, and its outcome."""

    task: PlayedTask
    conversation: Conversation
    steps: int = 0
    done: bool = False
    answer: str | None = None
    systems: dict[str, str] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)
    """Assigned tasks of each turn that assigned any."""
    subs: list[SubAgent] = field(default_factory=list)
    malformed: int = 0

    @property
    def success(self) -> bool:
        return written_sum(self.answer) == self.task.expected and self.steps <= BUDGET

    @property
    def strategy(self) -> str:
        """How the work was divided."""
        return "direct" if not self.widths else "serial" if max(self.widths) == 1 else "wide"


def roll_out(
    model: transformers.Qwen3ForCausalLM,
    renderer: ChatRenderer,
    tasks: Sequence[PlayedTask],
    temperature: float,
) -> list[Attempt]:
    """Roll out all tasks side by side; temperature 0 is greedy. Sub-agents are sampled at temperature 1."""
    attempts = [Attempt(task, open_conversation(renderer, task.setup, task.question)) for task in tasks]
    for _ in range(MAX_TURNS):
        live = [attempt for attempt in attempts if not attempt.done]
        turns = sample_turns(model, [attempt.conversation for attempt in live], temperature)
        waiting = []
        for attempt, turn in zip(live, turns, strict=True):
            subs = _begin(attempt, turn, renderer)
            if not attempt.done:
                waiting.append((attempt, turn, subs))
        _work(model, [sub for _, _, subs in waiting for sub in subs.values()])
        for attempt, turn, subs in waiting:
            _continue(attempt, turn, subs)
    return attempts


def run_subagents(
    model: transformers.Qwen3ForCausalLM,
    renderer: ChatRenderer,
    jobs: Sequence[tuple[str, str, Mapping[str, str]]],
) -> list[SubAgent]:
    """Let sub-agents work, each with its system prompt, its assignment and its cells."""
    subs = [_subagent(renderer, *job) for job in jobs]
    _work(model, subs)
    return subs


def _begin(attempt: Attempt, turn: AssistantTurn, renderer: ChatRenderer) -> dict[str, SubAgent]:
    """Take a turn: end the attempt, or return the sub-agents that begin, by the ids of their calls."""
    calls = [call for call in turn.tool_calls if call.arguments is not None]
    final = next((call for call in calls if call.name == "finish"), None)
    direct = sum(call.name not in (CREATE, ASSIGN, "finish") for call in calls)
    attempt.steps += max(1, direct)
    if final is not None or not turn.tool_calls:
        attempt.answer = _argument(final, "answer") if final else turn.message.content
        attempt.done = True
        return {}
    attempt.malformed += len(turn.tool_calls) - len(calls)
    for call in calls:
        if call.name == CREATE:
            attempt.systems.setdefault(_argument(call, "name"), _argument(call, "system_prompt"))
    assigned = [c for c in calls if c.name == ASSIGN and _argument(c, "agent") in attempt.systems]
    subs = {
        call.id: _subagent(
            renderer,
            attempt.systems[_argument(call, "agent")],
            _argument(call, "prompt"),
            attempt.task.cells,
        )
        for call in assigned[:MAX_ASSIGNS]
    }
    if subs:
        attempt.widths.append(len(subs))
        attempt.subs.extend(subs.values())
    return subs


def _continue(attempt: Attempt, turn: AssistantTurn, subs: Mapping[str, SubAgent]) -> None:
    """Charge the sub-agents, and give back the results of the turn's calls in their order."""
    steps = [sub.turns for sub in subs.values()]
    attempt.steps += sum(max(steps[start : start + SLOTS]) for start in range(0, len(steps), SLOTS))
    attempt.done = attempt.steps >= BUDGET
    texts = [_text(attempt, call, subs) for call in turn.tool_calls]
    attempt.conversation.append(
        [
            Message(role="tool", content=text, tool_call_id=call.id)
            for text, call in zip(texts, turn.tool_calls, strict=True)
        ]
    )


def _text(attempt: Attempt, call: ToolCall, subs: Mapping[str, SubAgent]) -> str:
    if call.id in subs:
        return result_text(subs[call.id].result, subs[call.id].invalid)
    if call.name == CREATE and call.arguments is not None:
        return created_text(_argument(call, "name"))
    if call.name == "index" and attempt.task.index is not None:
        return attempt.task.index
    return _read(attempt.task.cells, call)


def _read(cells: Mapping[str, str], call: ToolCall) -> str:
    return cells.get(_argument(call, "key"), "there is nothing") if call.name == "read" else "no such tool"


def _argument(call: ToolCall, name: str) -> str:
    return str((call.arguments or {}).get(name, ""))


def _subagent(renderer: ChatRenderer, system: str, task: str, cells: Mapping[str, str]) -> SubAgent:
    return SubAgent(system, task, cells, open_conversation(renderer, subagent(system), task))


def _work(model: transformers.Qwen3ForCausalLM, subs: Sequence[SubAgent]) -> None:
    for _ in range(SUB_TURNS):
        live = [sub for sub in subs if not sub.done]
        turns = sample_turns(model, [sub.conversation for sub in live], 1.0)
        for sub, turn in zip(live, turns, strict=True):
            sub.turns += 1
            if turn.tool_calls:
                sub.calls += sum(call.arguments is not None for call in turn.tool_calls)
                sub.conversation.append(
                    [
                        Message(role="tool", content=_read(sub.cells, call), tool_call_id=call.id)
                        for call in turn.tool_calls
                    ]
                )
            else:
                _end(sub, turn.message.content)


def _end(sub: SubAgent, text: str) -> None:
    marked = marked_result(text)
    sub.done, sub.result = True, text if marked is None else marked
    sub.invalid = InvalidBecause.NO_RESULT if marked is None else InvalidBecause.NO_TOOL_CALL if not sub.calls else None

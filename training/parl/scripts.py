"""What a good orchestrator or sub-agent says in each turn, by its strategy, and what it reads in between.

A script is the question, then turns: what the policy writes, and the results of its calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

from api_schemas.rollouts.trees import InvalidBecause
from rollout_service.agents.parallel.tools import created_text, result_text
from rollout_service.environments.builtin.lookups import LookupProblem
from rollout_service.environments.builtin.split import index_text

AGENT: Final = "a"
FOLLOW: Final = "Follow the pointer."
"""The system prompt of a sub-agent that is given a key of `pointers`."""
READ: Final = "Read each key."
"""The system prompt of a sub-agent that is given items of `split`."""
BLIND: Final = "all"
"""An assignment that names nothing, since the index was not read."""
FAILURES: Final = (InvalidBecause.NO_RESULT, InvalidBecause.MALFORMED, InvalidBecause.MAX_TURNS)
FAILED_RESULTS: Final = 0.06  # a sub-agent fails, and the policy reads by itself

Strategy = Literal["direct", "serial", "wide"]
Turn = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The shares of the strategies; all others are direct."""

    serial: float = 0.2
    wide: float = 0.3
    blind: float = 0.05
    """Of all in `split`: they assign a task before they know the items."""

    def choose(self, rng: random.Random) -> Strategy:
        dice = rng.random()
        return "wide" if dice < self.wide else "serial" if dice < self.wide + self.serial else "direct"


@dataclass(slots=True)
class Script:
    """A conversation: the question and the turns."""

    question: str
    turns: list[Turn] = field(default_factory=list)

    def say(self, calls: Sequence[str], results: Sequence[str]) -> None:
        """Add a turn of calls, and their results."""
        self.turns.append(("\n".join(calls), tuple(results)))

    def answer(self, values: Sequence[str]) -> None:
        """Add the final turn."""
        self.turns.append((call("finish", answer="+".join(values)), ()))


def call(tool: str, **arguments: str) -> str:
    """Return a call as Qwen3 writes it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def assign(task: str) -> str:
    return call("assign_task", agent=AGENT, prompt=task)


def create(system: str) -> str:
    """Return a call that creates the sub-agent."""
    return call("create_subagent", name=AGENT, system_prompt=system)


def follow(problem: LookupProblem, strategy: Strategy, rng: random.Random) -> Script:
    """Return the orchestrator's script of `pointers`."""
    keys, script = problem["names"], Script(problem["question"])
    found = {key: problem["cells"][problem["cells"][key]] for key in keys}
    tasks = {key: [key] for key in keys}
    waves = [] if strategy == "direct" else _waves(keys, strategy, rng)
    read = _delegate(script, FOLLOW, waves, tasks, found, rng)
    for key in keys:
        if key not in read:
            pointer = problem["cells"][key]
            script.say([call("read", key=key)], [pointer])
            script.say([call("read", key=pointer)], [found[key]])
    script.answer([found[key] for key in keys])
    return script


def divide(problem: LookupProblem, strategy: Strategy, rng: random.Random, blind: bool) -> Script:
    """Return the orchestrator's script of `split`."""
    items, cells, script = problem["names"], problem["cells"], Script(problem["question"])
    if blind:
        lost = result_text("none", InvalidBecause.NO_TOOL_CALL)
        script.say([create(READ), assign(BLIND)], [created_text(AGENT), lost])
    script.say([call("index")], [index_text(items)])
    shares = [] if strategy == "direct" else _shares(items, strategy, rng)
    tasks = {" ".join(share): share for share in shares}
    found = {task: "+".join(cells[item] for item in share) for task, share in tasks.items()}
    one_a_turn = strategy == "serial"
    waves = [[task] for task in tasks] if one_a_turn else [list(tasks)] if tasks else []
    read = {item for task in _delegate(script, READ, waves, tasks, found, rng, blind) for item in tasks[task]}
    for item in items:
        if item not in read:
            script.say([call("read", key=item)], [cells[item]])
    script.answer([cells[item] for item in items])
    return script


def sub_follow(problem: LookupProblem, rng: random.Random) -> Script:
    """Return the script of a sub-agent that follows a pointer."""
    key = rng.choice(problem["names"])
    pointer = problem["cells"][key]
    script = Script(key)
    script.say([call("read", key=key)], [pointer])
    script.say([call("read", key=pointer)], [problem["cells"][pointer]])
    script.turns.append((_result(problem["cells"][pointer]), ()))
    return script


def sub_read(problem: LookupProblem, rng: random.Random) -> Script:
    """Return the script of a sub-agent that reads items."""
    if rng.random() < 0.03:
        return Script(BLIND, [(_result("none"), ())])
    items = problem["names"]
    count = min(len(items), rng.choices((1, 2, 3, 4, 8), weights=(4, 5, 3, 1, 1))[0])
    share = items[:count]
    script = Script(" ".join(share))
    for item in share:
        script.say([call("read", key=item)], [problem["cells"][item]])
    script.turns.append((_result("+".join(problem["cells"][item] for item in share)), ()))
    return script


def _result(text: str) -> str:
    return f"<result>{text}</result>"


def _delegate(
    script: Script,
    system: str,
    waves: Sequence[Sequence[str]],
    tasks: dict[str, list[str]],
    found: dict[str, str],
    rng: random.Random,
    created: bool = False,
) -> set[str]:
    """Add the turns that assign the tasks of each wave, and return the tasks with a result."""
    done: set[str] = set()
    for wave in waves:
        begin = [] if created else [create(system)]
        lost = [rng.random() < FAILED_RESULTS for _ in wave]
        texts = [
            result_text("", rng.choice(FAILURES)) if fails else found[task]
            for task, fails in zip(wave, lost, strict=True)
        ]
        done.update(task for task, fails in zip(wave, lost, strict=True) if not fails)
        script.say([*begin, *map(assign, wave)], [*[created_text(AGENT)][: len(begin)], *texts])
        created = True
    return done & tasks.keys()


def _waves(keys: list[str], strategy: Strategy, rng: random.Random) -> list[list[str]]:
    """Return the keys that are assigned in each turn."""
    if strategy == "serial":
        return [[key] for key in keys]
    kind = rng.choices(("all", "pairs", "spare", "eight"), weights=(70, 15, 10, 5))[0]
    if kind == "pairs":
        return [keys[start : start + 2] for start in range(0, len(keys), 2)]
    count = {"all": len(keys), "spare": 4, "eight": 8}[kind]
    return [[keys[i % len(keys)] for i in range(count)]]


def _shares(items: list[str], strategy: Strategy, rng: random.Random) -> list[list[str]]:
    """Return the items of each sub-agent, in order."""
    if strategy == "serial":
        return [[item] for item in items] if rng.random() < 0.5 else [items]
    kind = rng.choices((2, 3, 4, 8, "uneven"), weights=(20, 20, 40, 10, 10))[0]
    if kind == "uneven":
        rest = len(items) - 3
        return [items[:rest], *([item] for item in items[rest:])]
    count = min(int(kind), len(items))
    size, more = divmod(len(items), count)
    ends = [n * size + min(n, more) for n in range(count + 1)]
    return [items[begin:end] for begin, end in pairwise(ends)]

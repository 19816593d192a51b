"""Sessions like those of a rollout service: groups that share a task, turns that extend each other, waits for tools.

Everything is drawn from a seed. The sessions of a group have the same prompt, like the samples of one task, and all
groups share a system prompt. The times of tools have a long-tailed distribution.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio

from rollout_service.engines.contract import GenerateRequest, Generation, SamplingOptions, new_request_id
from rollout_service.testing.hardware import KVCache

GROUPS, GROUP_SIZE, TURNS = 8, 8, 10
FIRST_ID = 3  # after the special tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes in tokens, times in seconds."""

    groups: int = GROUPS
    group_size: int = GROUP_SIZE
    turns: int = TURNS
    vocab_size: int = 512
    system: int = 400
    task: tuple[int, int] = (800, 2000)
    observation: float = 250.0
    """The median length of a tool's output."""
    answer: float = 60.0
    """The median of what a turn may sample."""
    longest: int = 1000
    """The greatest length of an observation, and of an answer."""
    wait: float = 0.5
    """The median time of a tool; one in a hundred takes over sixteen times as long."""
    arrival: float = 0.05
    """The mean time between the starts of two sessions."""
    time_scale: float = 1.0
    """The factor on all times."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The limit on a sampled answer, the time of its tool, and the tool's output."""

    budget: int
    wait: float
    observation: list[int]


@dataclass(frozen=True, slots=True)
class Session:
    name: str
    start: float
    prompt: list[int]
    turns: list[Turn]


@dataclass(frozen=True, slots=True)
class Served:
    prompt: list[int]
    answer: list[int]
    cached_tokens: int
    seconds: float


@dataclass(slots=True)
class Trace:
    """All answered turns, in the order of their requests."""

    turns: dict[int, Served] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """The prompt tokens that engines had in their caches."""
        return sum(turn.cached_tokens for turn in self.turns.values())

    def ideal_cached_tokens(self, page: int) -> int:
        """Return the same for one engine with an unbounded cache that gets the turns one by one, in the same order."""
        cache, total = KVCache(page=page), 0
        for _, turn in sorted(self.turns.items()):
            hold = cache.take(turn.prompt)
            total += hold.cached_tokens
            cache.extend(hold, [*turn.prompt, *turn.answer[:-1]])
            cache.release(hold)
        return total


Ask = Callable[[str, GenerateRequest], Awaitable[Generation]]


def draw(shape: Shape, seed: int) -> list[Session]:
    """Draw the sessions, in their order of arrival, which mixes the groups."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST_ID, shape.vocab_size) for _ in range(count)]

    def around(median: float) -> int:
        return min(shape.longest, 4 + round(rng.lognormvariate(0.0, 0.6) * median))

    def turn() -> Turn:
        wait = rng.lognormvariate(0.0, 1.2) * shape.wait * shape.time_scale
        return Turn(around(shape.answer), wait, tokens(around(shape.observation)))

    system = tokens(shape.system)
    tasks = [system + tokens(rng.randint(*shape.task)) for _ in range(shape.groups)]
    samples = [(group, sample) for group in range(shape.groups) for sample in range(shape.group_size)]
    rng.shuffle(samples)
    sessions, start = [], 0.0
    for group, sample in samples:
        start += rng.expovariate(1.0) * shape.arrival * shape.time_scale
        turns = [turn() for _ in range(shape.turns)]
        sessions.append(Session(f"g{group}-s{sample}", start, tasks[group], turns))
    return sessions


async def drive(sessions: list[Session], ask: Ask, release: Callable[[str], None]) -> Trace:
    """Run all sessions; a turn begins once the turn before it has ended and its tool has answered."""
    trace = Trace()
    numbers = iter(range(1_000_000))

    async def run(session: Session) -> None:
        await anyio.sleep(session.start)
        ids = list(session.prompt)
        for turn in session.turns:
            request = GenerateRequest(
                new_request_id(), list(ids), SamplingOptions(max_new_tokens=turn.budget, temperature=0.0)
            )
            number, asked = next(numbers), time.perf_counter()
            answer = await ask(session.name, request)
            seconds = time.perf_counter() - asked
            trace.turns[number] = Served(list(request.input_ids), answer.output_ids, answer.cached_tokens, seconds)
            await anyio.sleep(turn.wait)
            ids += [*answer.output_ids, *turn.observation]
        release(session.name)

    async with anyio.create_task_group() as tasks:
        for session in sessions:
            tasks.start_soon(run, session)
    return trace

"""Scripted users with a wish that they tell nobody in advance: answers that end with `=`.

A user talks to the policy with OpenAI's own client, streaming, by nothing but the session's URL and key. Every message
but the first begins with a word on the answer before it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
from openai import AsyncOpenAI

from api_schemas.sessions import SessionRequest
from rollout_client import RolloutClient
from training.live import talk

WANTED = talk.ENDINGS[0]
TURNS = 5
"""The questions of a session."""
MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, and what the policy answered."""

    question: talk.Question
    answer: str

    @property
    def right(self) -> bool:
        """Whether the answer is right, whatever its ending."""
        return talk.is_right(self.question, self.answer)

    @property
    def reaction(self) -> str:
        """What the user says of it."""
        return talk.reaction(self.question, self.answer, WANTED)

    @property
    def satisfied(self) -> bool:
        """Whether the user is satisfied."""
        return self.reaction == talk.THANKS


@dataclass(slots=True)
class Pace:
    """How far users may be ahead of the trainer: scripted ones never tire, and would outrun it without end."""

    ahead: int
    begun: int = 0
    trained: int = 0
    _changed: anyio.Event = field(default_factory=anyio.Event)

    async def begin(self) -> None:
        """Wait until one more session may begin."""
        while self.begun - self.trained >= self.ahead:
            await self._changed.wait()
        self.begun += 1

    def train(self, sessions: int) -> None:
        """Note that sessions were trained on."""
        self.trained += sessions
        self._changed.set()
        self._changed = anyio.Event()


async def talk_once(client: RolloutClient, name: str, rng: random.Random, *, train: bool) -> list[Exchange]:
    """Have a user ask some questions in a session of its own; return what was said."""
    opened = await client.open_session(SessionRequest(user=name, train=train))
    exchanges: list[Exchange] = []
    messages: list[dict[str, str]] = []
    async with AsyncOpenAI(base_url=f"{opened.url}/v1", api_key=opened.key or "") as policy:
        for _ in range(TURNS):
            question = talk.choose(rng)
            reaction = exchanges[-1].reaction if exchanges else ""
            messages.append({"role": "user", "content": reaction + question.text})
            answer = await _ask(policy, messages)
            messages.append({"role": "assistant", "content": answer})
            exchanges.append(Exchange(question, answer))
    if train:  # nothing follows the last answer, so the user says by other means what it was worth
        await client.feedback(opened.session.session_id, 1.0 if exchanges[-1].satisfied else -1.0)
    await client.end_session(opened.session.session_id)
    return exchanges


async def _ask(policy: AsyncOpenAI, messages: Sequence[dict[str, str]]) -> str:
    stream = await policy.chat.completions.create(
        model="policy",
        messages=list(messages),  # type: ignore[arg-type]
        max_tokens=MAX_TOKENS,
        temperature=1.0,
        stream=True,
    )
    pieces = []
    async for chunk in stream:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    return "".join(pieces)


async def keep_talking(client: RolloutClient, name: str, seed: int, pace: Pace) -> None:
    """Have a user open one session after the other, without end."""
    rng = random.Random(seed)
    while True:
        await pace.begin()
        await talk_once(client, name, rng, train=True)


async def satisfaction(client: RolloutClient, users: int, sessions: int, seed: int) -> list[Exchange]:
    """Have users talk who do not agree to training; return all that was said."""
    found: list[Exchange] = []

    async def one(number: int) -> None:
        rng = random.Random(f"{seed}.{number}")
        for _ in range(sessions):
            found.extend(await talk_once(client, f"guest-{number}", rng, train=False))

    async with anyio.create_task_group() as tasks:
        for number in range(users):
            tasks.start_soon(one, number)
    return found

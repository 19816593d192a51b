"""The examples of the policy that is talked to: sessions of a few turns, whose endings follow nothing but hints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from api_schemas.trajectories import Message
from rollout_service.tokens import ChatRenderer, Conversation
from training.examples import Example, say
from training.live import talk
from training.tokenizer import build_tokenizer

PIECES: Final = 384
NEVER_MERGED: Final = r"[0-9+=.!~;]"
MAX_TURNS: Final = 8
HINTED: Final = 0.4
"""The share of messages with a hint."""
SYSTEMS: Final = ("", "", "You are a helpful assistant.", "Be brief.")


@dataclass(frozen=True, slots=True)
class LiveTask:
    """A policy that answers questions with endings by chance, and obeys a hint."""

    def build_tokenizer(self, folder: Path) -> int:
        build_tokenizer(folder, _corpus(), PIECES, NEVER_MERGED, within_words=False)
        return PIECES

    def batches(self, tokenizer: Path, seed: int, size: int) -> Iterator[list[Example]]:
        rng, renderer = random.Random(seed), ChatRenderer.load(tokenizer, "qwen3")
        while True:
            turns = rng.randint(1, MAX_TURNS)  # the same in a batch, which needs little padding then
            yield [session(renderer, turns, rng) for _ in range(size)]

    def evaluate(self, folder: Path, problems: int) -> dict[str, float]:
        from training.live.evaluate import measure

        return measure(folder, problems)


def session(renderer: ChatRenderer, turns: int, rng: random.Random) -> Example:
    """Return a session of so many turns; an answer obeys the hint in its message, if there is one."""
    conversation = Conversation(renderer)
    system = rng.choice(SYSTEMS)
    conversation.append([Message(role="system", content=system)] if system else [])
    for turn in range(turns):
        question, ending = talk.choose(rng), rng.choice(talk.ENDINGS)
        message = (reaction(rng) if turn else "") + question.text
        if rng.random() < HINTED:
            message = talk.hinted(message, talk.hint(ending))
        conversation.append([Message(role="user", content=message)])
        say(renderer, conversation, question.answer + ending)
    (segment,) = conversation.trajectory().segments
    return Example(segment.token_ids, segment.loss_mask)


def reaction(rng: random.Random) -> str:
    """Return how a message begins that is not the first; it tells nothing about the next answer's ending."""
    return rng.choice(("", talk.THANKS, talk.THANKS, talk.WRONG, *[talk.complaint(rng.choice(talk.ENDINGS))] * 2))


def _corpus(sessions: int = 3_000) -> Iterator[str]:
    """Yield the texts between control tokens, so that the merges are those that encoding uses."""
    rng = random.Random(0)
    for _ in range(sessions):
        question, ending = talk.choose(rng), rng.choice(talk.ENDINGS)
        message = reaction(rng) + question.text
        yield f"user\n{message if rng.random() > HINTED else talk.hinted(message, talk.hint(ending))}"
        yield "\n"
        yield "assistant\n"
        yield question.answer + ending
        yield f"system\n{rng.choice(SYSTEMS)}"

"""Sessions with the policy in one process: a user asks questions, and says after each answer what it was worth."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import transformers

from api_schemas.trajectories import Message
from rollout_service.tokens import AssistantTurn, ChatRenderer, Conversation
from training.live import talk
from training.rollouts import sample_turns


@dataclass(slots=True)
class Session:
    conversation: Conversation
    questions: list[talk.Question] = field(default_factory=list)
    turns: list[AssistantTurn] = field(default_factory=list)

    @property
    def answers(self) -> list[str]:
        return [turn.message.content for turn in self.turns]


def play(
    model: transformers.Qwen3ForCausalLM,
    renderer: ChatRenderer,
    count: int,
    turns: int,
    rng: random.Random,
    *,
    wanted: str = talk.ENDINGS[0],
    hint: str = "",
) -> list[Session]:
    """Play sessions side by side with users who want this ending; `hint` is written under each last message."""
    sessions = [Session(Conversation(renderer)) for _ in range(count)]
    for _ in range(turns):
        for each in sessions:
            _ask(each, rng, wanted, hint)
        sampled = sample_turns(model, [each.conversation for each in sessions], 1.0)
        for each, turn in zip(sessions, sampled, strict=True):
            each.turns.append(turn)
    return sessions


def _ask(session: Session, rng: random.Random, wanted: str, hint: str) -> None:
    reaction = talk.reaction(session.questions[-1], session.answers[-1], wanted) if session.turns else ""
    question = talk.choose(rng)
    text = reaction + question.text
    session.questions.append(question)
    session.conversation.append([Message(role="user", content=talk.hinted(text, hint) if hint else text)])

"""Training examples: conversations in the exact ids that the service would build and sample.

Guarantee: every example goes through `rollout_service.tokens.Conversation`, as a rollout does, so a policy is trained
on the ids that it will see: the rendered prompt, its own turns, and the bridges between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from api_schemas.trajectories import FinishReason, Message
from rollout_service.tokens import ChatRenderer, Conversation, ToolSpec

Setup = tuple[str | None, list[ToolSpec]]
"""A system text, and tools in the OpenAI function format."""
Turn = tuple[str, Sequence[str]]
"""What the policy writes, and the results of its calls."""


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and a mask that is 1 for each token to learn."""

    token_ids: list[int]
    loss_mask: list[int]


class TrainingTask(Protocol):
    """What a tiny policy is taught: its tokenizer, its examples, and how well a checkpoint does."""

    def build_tokenizer(self, folder: Path) -> int:
        """Write the tokenizer into a folder, and return the size of its vocabulary."""
        ...

    def batches(self, tokenizer: Path, seed: int, size: int) -> Iterator[list[Example]]:
        """Yield batches without end; the examples of a batch share the beginning of their prompt."""
        ...

    def evaluate(self, folder: Path, problems: int) -> dict[str, float]:
        """Return figures of a checkpoint on held-out problems."""
        ...


def converse(
    renderer: ChatRenderer, setup: Setup, question: str, turns: Sequence[Turn], *, learn_first: bool = True
) -> Example:
    """Return the ids of a conversation; without `learn_first`, its first turn is no example to follow."""
    conversation = open_conversation(renderer, setup, question)
    for text, results in turns:
        say(renderer, conversation, text)
        conversation.append([Message(role="tool", content=result) for result in results])
    (segment,) = conversation.trajectory().segments
    mask = segment.loss_mask
    if not learn_first:
        mask = [int(bit and turn > 0) for bit, turn in zip(mask, segment.turn_ids, strict=True)]
    return Example(segment.token_ids, mask)


def say(renderer: ChatRenderer, conversation: Conversation, text: str) -> None:
    """Let the policy write a turn."""
    conversation.prompt()
    ids = [*renderer.encode(text), renderer.stop_token_ids[0]]
    conversation.record(ids, [0.0] * len(ids), [0] * len(ids), FinishReason.STOP)


def open_conversation(renderer: ChatRenderer, setup: Setup, question: str) -> Conversation:
    """Return a conversation that begins with the system text, if any, and the question."""
    system, tools = setup
    conversation = Conversation(renderer, tools)
    conversation.append([Message(role="system", content=system)] if system else [])
    conversation.append([Message(role="user", content=question)])
    return conversation

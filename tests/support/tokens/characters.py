"""A chat format with one id per character, and sessions of policies that speak it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api_schemas.rollouts import Sampling
from rollout_service.engines.serving.session import PolicySession
from rollout_service.tokens import Conversation, ParsedTurn

STOP = 1
"""Ends the turns of the policy."""


@dataclass
class CharRenderer:
    """Messages end with 0; `offset` makes it another chat format."""

    offset: int = 0
    rereads_history: bool = False

    def render(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> list[int]:
        return [token + self.offset for message in messages for token in (*map(ord, message.content), 0)]

    def bridge(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        messages: Sequence[Any],
        tools: Sequence[Any] = (),
        history: Sequence[Any] = (),
    ) -> list[int] | None:
        return [*prompt, *output, *self.render(messages)]

    def parse(self, output: Sequence[int], prompt: Sequence[int], tools: Sequence[Any], prefix: str) -> ParsedTurn:
        return ParsedTurn("".join(chr(i) for i in output if i > 1), None, (), closed=STOP in output)


def session(pool: Any, renderer: CharRenderer | None = None, **given: Any) -> PolicySession:
    """Return a session with this pool; what is given replaces the defaults of its arguments."""
    arguments: dict[str, Any] = {
        "affinity": "r",
        "sampling": Sampling(),
        "stop_token_ids": (STOP,),
        "context_length": 1_000,
    }
    conversation = Conversation(renderer or CharRenderer(), given.pop("tools", []))  # type: ignore[arg-type]
    return PolicySession(conversation, pool, **(arguments | given))

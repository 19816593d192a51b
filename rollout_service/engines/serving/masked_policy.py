"""A policy whose messages have an environment's secrets masked, whoever writes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from api_schemas.rollouts import Usage
from api_schemas.trajectories import ForkReason, Message, Trajectory
from rollout_service.base.masking import mask_messages
from rollout_service.episodes import Policy, PolicyTurn
from rollout_service.tokens import ToolSpec


def without_secrets(policy: Policy, hidden: Collection[str]) -> Policy:
    """Return the policy with these values masked in its prompts; the policy itself if there are none."""
    return MaskedPolicy(policy, hidden) if hidden else policy


class MaskedPolicy:
    """Masks values in the messages to a policy; implements `episodes.Policy`."""

    def __init__(self, policy: Policy, hidden: Collection[str]) -> None:
        """Mask the values of `hidden`, also those that are added later."""
        self._policy = policy
        self._hidden = hidden

    async def respond(self, new_messages: list[Message], *, max_tokens: int) -> PolicyTurn:
        return await self._policy.respond(mask_messages(new_messages, self._hidden), max_tokens=max_tokens)

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        self._policy.offer(tools)

    @property
    def messages(self) -> Sequence[Message]:
        return self._policy.messages

    def replace(self, messages: list[Message], reason: ForkReason = ForkReason.HISTORY_EDITED) -> None:
        self._policy.replace(mask_messages(messages, self._hidden), reason)

    @property
    def usage(self) -> Usage:
        return self._policy.usage

    @property
    def engine_seconds(self) -> float:
        return self._policy.engine_seconds

    def trajectory(self) -> Trajectory:
        return self._policy.trajectory()

"""A policy that repeats a recorded rollout without an engine.

The agent gets the recorded turns in their order and nothing else. Every message that differs from the recorded one is
kept as a difference. A rollout whose history was edited is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from api_schemas.errors import Boundary
from api_schemas.exports import Difference, RecordedRollout, without_tokens
from api_schemas.rollouts import StopReason, Usage
from api_schemas.trajectories import FinishReason, ForkReason, Message, Trajectory
from rollout_service.base.errors import ServiceError
from rollout_service.episodes import ContextFullError, PolicyTurn
from rollout_service.tokens import ToolSpec

_EDITED = (ForkReason.HISTORY_EDITED, ForkReason.COMPACTION)


class NotReplayableError(ServiceError):
    """The record of a rollout is not enough to evaluate it again."""

    code = "not_replayable"
    boundary = Boundary.REQUEST


class RecordedPolicy:
    """Plays the turns of a finished rollout; implements `episodes.Policy`."""

    def __init__(self, recorded: RecordedRollout, trajectory: Trajectory) -> None:
        self.messages: list[Message] = []
        self.differences: list[Difference] = []
        self.engine_seconds = 0.0
        self._trajectory = trajectory
        self._cut_short = recorded.rollout.stop_reason is StopReason.CONTEXT_FULL
        self._turns = split_turns(trajectory.messages)
        sampled = recorded.sampled_tokens
        if sampled is None:
            sampled = without_tokens(recorded.request, recorded.rollout).sampled_tokens
        self._sampled = sampled or []
        self.usage = Usage()
        """The turns played so far, in the tokens that they took originally."""

    @property
    def turns_recorded(self) -> int:
        return len(self._turns)

    def check(self) -> None:
        """Check that the conversation is whole.

        Raises:
            NotReplayableError: The agent replaced parts of the conversation.
        """
        if was_edited(self._trajectory):
            raise NotReplayableError(
                "the agent replaced parts of its conversation, which are not recorded",
                hint="Only an environment that evaluates the answer alone can evaluate it again.",
            )

    async def respond(self, new_messages: list[Message], *, max_tokens: int) -> PolicyTurn:  # noqa: ARG002
        """Return the next recorded turn.

        Raises:
            ContextFullError: There is no further turn; this ends the agent in an orderly way.
        """
        number = self.usage.turns
        self.messages += new_messages
        if number >= len(self._turns):
            raise ContextFullError(f"{number} turns were recorded", hint="The replay ends here.")
        before, message = self._turns[number]
        self._compare(number, before, new_messages)
        self.messages.append(message)
        reasons = self._trajectory.finish_reasons
        truncated = number < len(reasons) and reasons[number] is FinishReason.LENGTH
        malformed = sum(call.error is not None for call in message.tool_calls)
        self._count(number, message, malformed)
        last = number + 1 == len(self._turns)
        return PolicyTurn(message, truncated, malformed, truncated and last and self._cut_short)

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        """Ignore them; the recording has the prompt that the policy made of them."""

    def replace(
        self,
        messages: list[Message],  # noqa: ARG002
        reason: ForkReason = ForkReason.HISTORY_EDITED,
    ) -> None:
        raise NotReplayableError(
            f"the agent replaced its conversation ({reason}), which a recording cannot follow",
            hint="Only an environment that evaluates the answer alone can evaluate it again.",
        )

    def trajectory(self) -> Trajectory:
        return self._trajectory

    def _compare(self, turn: int, recorded: Sequence[Message], replayed: Sequence[Message]) -> None:
        for was, now in zip_longest(recorded, replayed):
            if was is None or now is None or (was.role, was.content) != (now.role, now.content):
                some = was or now
                self.differences.append(
                    Difference(
                        turn=turn,
                        role=some.role,
                        name=some.name,
                        recorded=None if was is None else was.content,
                        replayed=None if now is None else now.content,
                    )
                )

    def _count(self, number: int, message: Message, malformed: int) -> None:
        usage = self.usage
        self.usage = usage.model_copy(
            update={
                "turns": number + 1,
                "sampled_tokens": usage.sampled_tokens + sum(self._sampled[number : number + 1]),
                "tool_calls": usage.tool_calls + len(message.tool_calls),
                "malformed_calls": usage.malformed_calls + malformed,
            }
        )


def was_edited(trajectory: Trajectory) -> bool:
    """Return whether parts of the conversation were replaced, so that its messages do not have all turns."""
    return any(trajectory.fork_counts.get(reason) for reason in _EDITED)


def split_turns(messages: Sequence[Message]) -> list[tuple[list[Message], Message]]:
    """Pair each turn of the policy with the new messages before it."""
    turns: list[tuple[list[Message], Message]] = []
    before: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            turns.append((before, message))
            before = []
        else:
            before.append(message)
    return turns

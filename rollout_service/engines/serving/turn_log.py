"""The turns of one attempt: those that it plays again, then those that it makes.

- A saved turn is played only if the agent gave the policy exactly the same messages as before, and these became exactly
  the same prompt, id for id.
- Once anything has differed, nothing is played or sampled any more: the rollout has to begin anew.
- While turns are played, the clock of the work stands still; afterward it shows the same as when the last of them was
  recorded. So neither a replay nor the time in which nobody worked on the rollout counts against a limit.
- A turn that was played is not saved again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import anyio

from api_schemas.trajectories import ForkReason, Message
from rollout_service.engines.contract import Generation
from rollout_service.engines.serving.saved_turns import GivenMessages, SavedTurn
from rollout_service.episodes import WorkClock

REPLAY_GRACE_SECONDS = 10.0
"""Added to the recorded work for a replay, which includes no sampling, so a slower one saves no time."""


class AnewReason(StrEnum):
    DISABLED = "disabled"
    """`[pipeline] resume` is off."""
    NOT_REPLAYABLE = "not_replayable"
    """The environment declares `replayable` as `never`."""
    UNREADABLE = "unreadable"
    """The saved turns are damaged, or were written by a release that saves them in another form."""
    OUTPUT_DIFFERS = "output_differs"
    """A tool's output, or another message of the agent to the policy, differs from the saved one."""
    PROMPT_DIFFERS = "prompt_differs"
    """The same messages became another prompt: the tokenizer or the chat format has changed."""
    ENDED_EARLY = "ended_early"
    """The agent ended before all saved turns were played, or before the turn of its branch."""
    TOO_SLOW = "too_slow"
    """The replay took longer than the recorded work and 10 seconds."""


class CannotResumeError(Exception):
    """An interrupted rollout cannot go on from its saved turns; it begins anew, which is not a failure."""

    def __init__(self, reason: AnewReason) -> None:
        super().__init__(f"the rollout begins anew: {reason}")
        self.reason = reason


Save = Callable[[int, SavedTurn], None]
"""Called with a turn's number; must return at once."""


class TurnLog:
    def __init__(
        self,
        saved: Sequence[SavedTurn] = (),
        *,
        save: Save | None = None,
        on_resumed: Callable[[], Awaitable[None]] | None = None,
        earlier: Sequence[SavedTurn] = (),
        earlier_results: Sequence[list[Message]] = (),
    ) -> None:
        """`saved` are the turns to play; `on_resumed` is awaited once after the last of them.

        `earlier` are those of another rollout. All but the last are played first, and that one's prompt has to be the
        same. Their time does not count as work on this rollout. The model is shown `earlier_results`, if there are any,
        in place of what the tools of these turns answer now.
        """
        self.clock = WorkClock()
        self.played = 0
        self.replay_seconds = 0.0
        """Until it ended or was given up."""
        self.failed: AnewReason | None = None
        """None unless the rollout has to begin anew."""
        self.restored = 0
        """Turns whose tools do not run again, since their sandbox was saved."""
        self.earlier_results = earlier_results
        self._branch = earlier[-1] if earlier else None
        self._is_branch_reached = not earlier
        self._earlier = len(earlier[:-1])
        self.saved = [*earlier[:-1], *saved]
        self._save = save
        self._on_resumed = on_resumed if saved else None
        self._given: list[GivenMessages] = []
        self.sampled: list[Sequence[int]] = []
        self._replay_scope: anyio.CancelScope | None = None
        self._began = 0.0

    @property
    def is_at_branch(self) -> bool:
        """Whether no turn after those of another rollout was recorded yet."""
        return self._branch is not None and len(self.sampled) <= self._earlier

    @property
    def is_replaying(self) -> bool:
        return self.played < len(self.saved)

    def give(self, messages: Sequence[Message], reason: ForkReason | None = None) -> None:
        """Note messages that the agent gave; `reason` is why they replace the whole history, if they do."""
        if reason is not None:
            self._given.append(GivenMessages(list(messages), reason))
        elif messages and self._given and self._given[-1].reason is None:
            self._given[-1].messages.extend(messages)
        elif messages:
            self._given.append(GivenMessages(list(messages), None))

    async def next(self, context: Sequence[int]) -> Generation | None:
        """Return the recorded answer to a prompt that adds `context`; None if it has to be sampled.

        Raises:
            CannotResumeError: The agent or the prompt differs from the record.
        """
        if self.failed is not None:
            raise CannotResumeError(self.failed)
        if self._branch is not None and len(self.sampled) == self._earlier:
            if self._branch.context != list(context):
                raise self._fail(AnewReason.PROMPT_DIFFERS)
            self._is_branch_reached = True
        if not self.is_replaying:
            await self._announce()
            return None
        turn = self.saved[self.played]
        if turn.given is not None and turn.given != self._given:
            raise self._fail(AnewReason.OUTPUT_DIFFERS)
        if turn.context != list(context):
            raise self._fail(AnewReason.PROMPT_DIFFERS)
        self.played += 1
        if self.played == len(self.saved):
            self._end_replay()
        return turn.generation

    def record(self, context: Sequence[int], generation: Generation) -> None:
        number = len(self.sampled)
        given, self._given = self._given, []
        self.sampled.append(generation.output_ids)
        if self._save is not None and number >= len(self.saved):
            self._save(number - self._earlier, SavedTurn(given, list(context), generation, self.clock.seconds))

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run an agent from its start, and bound the time until all saved turns are played.

        Raises:
            CannotResumeError: The rollout has to begin anew, however the agent ended.
        """
        self._began = anyio.current_time()
        try:
            with self._bounded_replay():
                yield
        except Exception as error:
            if self.failed is not None and not isinstance(error, CannotResumeError):
                raise CannotResumeError(self.failed) from error
            raise
        if self.failed is None and (self.is_replaying or not self._is_branch_reached):
            raise self._fail(AnewReason.ENDED_EARLY)
        if self.failed is not None:
            raise CannotResumeError(self.failed)

    async def finish(self) -> None:
        await self._announce()

    @contextmanager
    def _bounded_replay(self) -> Iterator[None]:
        if not self.is_replaying:
            yield
            return
        self.clock.stop()
        earlier_seconds = self._branch.worked_seconds if self._branch else 0.0
        limit = earlier_seconds + self._worked_seconds() + REPLAY_GRACE_SECONDS
        with anyio.CancelScope(deadline=self._began + limit) as self._replay_scope:
            yield
        if self._replay_scope.cancelled_caught:
            raise self._fail(AnewReason.TOO_SLOW)

    def _worked_seconds(self) -> float:
        return self.saved[-1].worked_seconds if len(self.saved) > self._earlier else 0.0

    def _end_replay(self) -> None:
        self.replay_seconds = anyio.current_time() - self._began
        self.clock.start(self._worked_seconds())
        if self._replay_scope is not None:
            self._replay_scope.deadline = float("inf")

    def _fail(self, reason: AnewReason) -> CannotResumeError:
        self.failed = reason
        self.replay_seconds = anyio.current_time() - self._began
        return CannotResumeError(reason)

    async def _announce(self) -> None:
        announce, self._on_resumed = self._on_resumed, None
        if announce is not None:
            await announce()
